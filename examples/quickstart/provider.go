package main

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// joinAfter is how long an agent takes from the start of its bootstrap to its
// join: seven stages of 4 s.
const joinAfter = 28 * time.Second

// retry is patient enough for everything in troubles but "slow=75s".
var retry = provisioning.RetryPolicy{OperationTimeout: time.Minute}

// troubles is what may befall the calls of a slot in one chapter. Of each kind
// up to most are drawn, each with a chance of one in oneIn. What they are:
// fakebackend.ParseOutcome.
var troubles = []struct {
	kind     provisioning.OperationKind
	oneIn    int
	most     int
	outcomes []string
}{
	{provisioning.CreateLease, 2, 3, []string{
		"slow=6s", "slow=20s",
		"slow=75s",              // outlives its deadline
		"ambiguous", "late=15s", // nothing was bought, or not yet, and nobody can know
		"done-ambiguous",      // a machine was bought and the answer is lost
		"panic", "done-panic", // a bug in the backend, before and after it bought
		"dead",                             // bought, of no use, and billed
		"capacity*3",                       // sold out
		"retry-after=25s",                  // throttled
		"ok-no-endpoint", "ok-no-endpoint", // ok, and the endpoint has to be looked up
	}},
	{provisioning.LookupEndpoint, 2, 2, []string{"not-ready*2", "not-ready*4", "definite", "slow=5s", "lost"}},
	{provisioning.StartBootstrap, 3, 1, []string{"definite", "ambiguous", "done-ambiguous", "panic", "slow=9s", "lost"}},
	{provisioning.BootstrapConvergenceObserved, 6, 1, []string{"ambiguous", "slow=5s", "definite"}},
	{provisioning.CancelBootstrap, 3, 1, []string{"ambiguous", "done-ambiguous", "definite", "slow=6s"}},
	{provisioning.DestroyLease, 2, 1, []string{"ambiguous", "done-ambiguous", "retry-after=10s", "panic", "slow=4s", "slow=12s"}},
}

// provider is the one that the fleet is rented from: the fake one in memory,
// where your own EffectBackend would stand.
type provider struct {
	*fakebackend.Backend
	work   *fakebackend.Work
	dice   *rand.Rand
	calls  map[provisioning.OperationKind]int
	buyers []provisioning.ExternalKey // attempts that asked for a machine
	lost   int                        // machines that were taken back
}

func newProvider(seed uint64) *provider {
	p := &provider{
		dice:  rand.New(rand.NewPCG(seed, 0)),
		calls: make(map[provisioning.OperationKind]int),
	}
	p.Backend = fakebackend.New(fakebackend.Config{JoinAfter: joinAfter, OnCall: p.note})
	p.work = p.NewWork()
	return p
}

func (p *provider) note(call fakebackend.Call) {
	p.calls[call.Kind]++
	if call.Outcome == fakebackend.Lost() {
		p.lost += p.LiveKey(call.Key)
	}
	if call.Kind == provisioning.CreateLease && !slices.Contains(p.buyers, call.Key) {
		p.buyers = append(p.buyers, call.Key)
	}
}

// count returns how many machines were bought and how many given back.
func (p *provider) count() (bought, returned int) {
	for _, key := range p.buyers {
		bought += p.CreatedKey(key)
		returned += p.DestroyedKey(key)
	}
	return bought, returned
}

// makeTrouble draws what will go wrong with a slot, where nothing is left of
// what was drawn before.
func (p *provider) makeTrouble(node provisioning.LogicalNodeID) {
	for _, t := range troubles {
		if len(p.Scripted(node, t.kind)) > 0 {
			continue
		}
		for range t.most {
			if p.dice.IntN(t.oneIn) > 0 {
				continue
			}
			outcomes, err := fakebackend.ParseOutcome(t.outcomes[p.dice.IntN(len(t.outcomes))])
			if err != nil {
				panic(err) // a mistake in troubles
			}
			p.Script(node, t.kind, outcomes...)
		}
	}
}

// takeBack ends one machine as a spot market does, and returns whose it was.
func (p *provider) takeBack() (provisioning.ExternalKey, bool) {
	machines := p.Machines()
	if len(machines) == 0 {
		return provisioning.ExternalKey{}, false
	}
	key := machines[p.dice.IntN(len(machines))].Key
	p.lost += p.Remove(key.Node)
	return key, true
}

// end lets calls that still run return, so that nothing of them stays behind.
func (p *provider) end() {
	p.work.RunAll()
	p.Close()
}
