package fakebackend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

// reference is a small backend that keeps all rules, over a provider with
// request tokens: the first create of a token makes a machine some time later,
// every further one waits for it. A flaw makes it break one rule.
type reference struct {
	flaw  string
	after func(time.Duration, func()) // the clock
	freed chan struct{}               // lets hanging calls go when the test is over

	mu       sync.Mutex
	machines map[string]*refMachine // by token
	made     int
	latest   provisioning.ProviderLeaseID
	lose     map[string]bool // answers that get lost, by token and operation
}

type refMachine struct {
	key     provisioning.ExternalKey
	lease   provisioning.ProviderLeaseID
	landed  chan struct{} // closed when it is there
	lives   bool
	booted  bool
	going   bool
	spent   bool
	session provisioning.BootstrapSessionID
	ended   bool
	started int
	told    bool // that it is gone
	also    int  // machines made beside it by a flaw
	listed  bool // it is old enough to be in a list that lags
	cut     bool // its create was cut off
	lost    bool // the answer to its create was lost
	past    bool // it is gone for so long that nobody knows of it
}

const (
	refLanding = 2 * time.Second
	refBoot    = 3 * time.Second
	refJoin    = 5 * time.Second
	refGoing   = 2 * time.Second
	refLag     = time.Minute
	refForget  = 30 * time.Minute
)

func (r *reference) token(key provisioning.ExternalKey) string {
	switch r.flaw {
	case "a key without its attempt":
		key.Attempt = 1
	case "a key without its run":
		key.Run = ""
	case "a key that runs together":
		return fmt.Sprint(key.Run, "-", key.Node, "-", key.Attempt)
	case "a key that takes w-10 for w-1":
		key.Node = provisioning.LogicalNodeID(strings.TrimSuffix(string(key.Node), "0"))
	case "a name that is cut":
		key.Node = key.Node[:min(len(key.Node), 63)]
	case "a name in lower case":
		key.Node = provisioning.LogicalNodeID(strings.ToLower(string(key.Node)))
	case "a name without what cannot be in it":
		key.Node = provisioning.LogicalNodeID(strings.Map(func(c rune) rune {
			if c == '_' || c == '.' || c > unicode.MaxASCII {
				return 'x'
			}
			return c
		}, string(key.Node)))
	}
	return key.Token()
}

// landing returns the request under the token, made now if there is none. The
// caller holds mu.
func (r *reference) landing(key provisioning.ExternalKey) *refMachine {
	m := &refMachine{key: key, landed: make(chan struct{})}
	r.made++
	m.lease = provisioning.ProviderLeaseID(fmt.Sprintf("lease-%d", r.made))
	r.machines[r.token(key)] = m
	r.after(refLanding, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		m.lives = true
		close(m.landed)
		r.after(refBoot, func() { r.mu.Lock(); m.booted = true; r.mu.Unlock() })
		r.after(refLag, func() { r.mu.Lock(); m.listed = true; r.mu.Unlock() })
	})
	return m
}

func (r *reference) CreateLease(ctx context.Context, req provisioning.CreateLeaseRequest) (provisioning.CreateLeaseResult, error) {
	if r.flaw == "no capacity" && !req.AdoptOnly {
		return provisioning.CreateLeaseResult{}, provisioning.RetryAfter(provisioning.Definite(errors.New("no capacity")), time.Minute)
	}
	if r.flaw == "a ctx that is done is a Definite no" && ctx.Err() != nil {
		return provisioning.CreateLeaseResult{}, provisioning.Definite(ctx.Err())
	}
	r.mu.Lock()
	m := r.machines[r.token(req.Key)]
	if r.flaw == "a longer name is taken for its beginning" && m == nil {
		for _, other := range r.machines {
			if other.key.Run == req.Key.Run && other.key.Attempt == req.Key.Attempt &&
				strings.HasPrefix(string(other.key.Node), string(req.Key.Node)) {
				m = other
			}
		}
	}
	switch {
	case m == nil && req.AdoptOnly && r.flaw == "adopt buys":
	case m == nil && req.AdoptOnly && r.flaw == "adopt buys and keeps it to itself":
		r.landing(req.Key).lives = true
		r.mu.Unlock()
		return provisioning.CreateLeaseResult{}, provisioning.ErrNothingToAdopt
	case m == nil && req.AdoptOnly && r.flaw == "adopt answers a plain Definite":
		r.mu.Unlock()
		return provisioning.CreateLeaseResult{}, provisioning.Definite(errors.New("no machine"))
	case m == nil && req.AdoptOnly && r.flaw == "adopt takes a neighbour":
		for _, other := range r.machines {
			if other.key.Node == req.Key.Node && other.lives {
				r.mu.Unlock()
				return provisioning.CreateLeaseResult{Lease: other.lease}, nil
			}
		}
		fallthrough
	case m == nil && req.AdoptOnly:
		r.mu.Unlock()
		return provisioning.CreateLeaseResult{}, provisioning.ErrNothingToAdopt
	case m != nil && req.AdoptOnly && r.flaw == "adopt looks at the list only" && !m.lives,
		m != nil && req.AdoptOnly && r.flaw == "adopt finds nothing" && m.lives:
		r.mu.Unlock()
		return provisioning.CreateLeaseResult{}, provisioning.ErrNothingToAdopt
	case m != nil && m.spent && r.flaw == "a spent key buys again" && !req.AdoptOnly:
		m.also++
		r.mu.Unlock()
		return provisioning.CreateLeaseResult{}, provisioning.LeaseLost(errors.New("token spent"))
	case m != nil && m.spent && r.flaw == "a spent key is adopted anew" && req.AdoptOnly:
		m = r.landing(req.Key)
		m.lives = true
	case m != nil && m.spent && r.flaw == "a spent token gives its dead lease" && !req.AdoptOnly:
		r.mu.Unlock()
		return provisioning.CreateLeaseResult{Lease: m.lease}, nil
	case m != nil && m.spent && r.flaw == "a dead machine is named":
		r.mu.Unlock()
		return provisioning.CreateLeaseResult{}, provisioning.LeaseLostWith(m.lease, errors.New("found dead"))
	case m != nil && m.spent:
		r.mu.Unlock()
		return provisioning.CreateLeaseResult{}, provisioning.LeaseLost(errors.New("token spent"))
	case m != nil && r.flaw == "a second create buys under the same lease" && !req.AdoptOnly && m.lives:
		m.also++
	case m != nil && r.flaw == "a create that was cut off is sent anew" && !req.AdoptOnly && m.cut,
		m != nil && r.flaw == "a create that was answered with an error is sent anew" && !req.AdoptOnly && m.lost,
		m != nil && r.flaw == "a list that lags is believed" && !req.AdoptOnly && !m.listed && req.Now.Sub(req.LastCreateAt) > 20*time.Second:
		m.also, m.cut, m.lost = m.also+1, false, false
	case m != nil && r.flaw == "a list that lags is believed when adopting" && req.AdoptOnly && !m.listed && req.Now.Sub(req.LastCreateAt) > 20*time.Second:
		r.mu.Unlock()
		return provisioning.CreateLeaseResult{}, provisioning.ErrNothingToAdopt
	case m != nil && r.flaw == "every create buys" && !req.AdoptOnly:
		m = nil
	case m != nil && r.flaw == "the zone follows the hour" && req.Now.Sub(req.LastCreateAt) > 30*time.Minute:
		m = nil
	case m != nil && r.flaw == "the token goes with the hour" && req.Now.Sub(req.LastCreateAt) > 30*time.Minute:
		r.mu.Unlock()
		return provisioning.CreateLeaseResult{}, provisioning.Definite(errors.New("token used with other parameters"))
	case m != nil && r.flaw == "a lost create is sent under another token" && !m.lives:
		also := m
		r.after(30*refLanding, func() { r.mu.Lock(); also.also++; r.mu.Unlock() })
	}
	first := m == nil
	if first {
		m = r.landing(req.Key)
	}
	r.latest = m.lease
	if r.flaw == "a ctx that is done buys and is NotStarted" && ctx.Err() != nil ||
		r.flaw == "the first create buys and is NotStarted" && first {
		m.lives = true
		r.mu.Unlock()
		return provisioning.CreateLeaseResult{}, provisioning.NotStarted(errors.New("given up"))
	}
	r.mu.Unlock()

	switch r.flaw {
	case "create hangs":
		if ctx.Err() != nil {
			<-r.freed
		}
	case "create panics":
		panic("nil map")
	case "create leaves its goroutine":
		runtime.Goexit()
	}
	if !m.awaited(ctx) {
		r.mu.Lock()
		m.cut = true
		r.mu.Unlock()
		if r.flaw == "a cut create is NotStarted" {
			return provisioning.CreateLeaseResult{}, provisioning.NotStarted(ctx.Err())
		}
		if r.flaw == "a cut create is Definite" {
			return provisioning.CreateLeaseResult{}, provisioning.Definite(ctx.Err())
		}
		if r.flaw == "a cut create is Definite and there" {
			r.mu.Lock()
			m.lives = true
			r.mu.Unlock()
			return provisioning.CreateLeaseResult{}, provisioning.Definite(ctx.Err())
		}
		return provisioning.CreateLeaseResult{}, ctx.Err()
	}
	if r.loses(req.Key, provisioning.CreateLease) {
		r.mu.Lock()
		m.lost = true
		r.mu.Unlock()
		if r.flaw == "a lost answer is NotStarted" {
			return provisioning.CreateLeaseResult{}, provisioning.NotStarted(errReset)
		}
		if r.flaw == "a lost answer is a Definite no" {
			return provisioning.CreateLeaseResult{}, provisioning.Definite(errReset)
		}
		return provisioning.CreateLeaseResult{}, errReset
	}
	switch r.flaw {
	case "calls share a variable":
		r.mu.Lock()
		defer r.mu.Unlock()
		return provisioning.CreateLeaseResult{Lease: r.latest}, nil
	case "no lease":
		return provisioning.CreateLeaseResult{}, nil
	case "a create answers half an endpoint":
		r.mu.Lock()
		defer r.mu.Unlock()
		if m.booted {
			return provisioning.CreateLeaseResult{Lease: m.lease, Endpoint: &provisioning.SSHEndpoint{Host: "localhost"}}, nil
		}
	case "the lease holds a secret":
		return provisioning.CreateLeaseResult{Lease: m.lease + provisioning.ProviderLeaseID(req.Spec.Boot.Env["PROVISIONING_CHECK_SECRET"])}, nil
	}
	return provisioning.CreateLeaseResult{Lease: m.lease}, nil
}

// awaited waits until the machine is there. One that is, is found however little
// time is left.
func (m *refMachine) awaited(ctx context.Context) bool {
	select {
	case <-m.landed:
		return true
	default:
	}
	select {
	case <-m.landed:
		return true
	case <-ctx.Done():
		return false
	}
}

var errReset = errors.New("connection reset by peer")

func (r *reference) loseAnswer(key provisioning.ExternalKey, kind provisioning.OperationKind) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lose[fmt.Sprint(r.token(key), kind)] = true
}

func (r *reference) loses(key provisioning.ExternalKey, kind provisioning.OperationKind) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	answer := fmt.Sprint(r.token(key), kind)
	defer delete(r.lose, answer)
	return r.lose[answer]
}

func (r *reference) find(key provisioning.ExternalKey) *refMachine {
	if m := r.machines[r.token(key)]; m != nil && m.lives {
		return m
	}
	return nil
}

func (r *reference) LookupEndpoint(ctx context.Context, req provisioning.LookupEndpointRequest) (provisioning.LookupEndpointResult, error) {
	if r.flaw == "a look-up that is cut off loses the machine" && ctx.Err() != nil {
		return provisioning.LookupEndpointResult{}, provisioning.LeaseLost(ctx.Err())
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch m := r.find(req.Key); {
	case m == nil && r.flaw == "an address is remembered" && r.machines[r.token(req.Key)] != nil:
	case m == nil && r.flaw == "gone is not yet":
		return provisioning.LookupEndpointResult{}, nil
	case m == nil:
		return provisioning.LookupEndpointResult{}, errors.New("no such machine")
	case !m.booted || r.flaw == "never answers":
		return provisioning.LookupEndpointResult{}, nil
	}
	endpoint := &provisioning.SSHEndpoint{Host: "localhost", Port: 22}
	switch r.flaw {
	case "an endpoint without a host":
		endpoint.Host = ""
	case "an endpoint without a port":
		endpoint.Port = 0
	}
	return provisioning.LookupEndpointResult{Endpoint: endpoint}, nil
}

func (r *reference) StartBootstrap(ctx context.Context, req provisioning.StartBootstrapRequest) (provisioning.StartBootstrapResult, error) {
	if r.flaw == "start hangs" && ctx.Err() != nil {
		<-r.freed
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.find(req.Key)
	if m == nil && r.flaw == "a start just connects to the address" && r.machines[r.token(req.Key)] != nil {
		return provisioning.StartBootstrapResult{Session: "another one's"}, nil
	}
	if m == nil || !m.booted {
		return provisioning.StartBootstrapResult{}, errors.New("no such machine")
	}
	if m.session != "" && !m.ended && r.flaw != "every start begins anew" && r.flaw != "a second start is an error" {
		return provisioning.StartBootstrapResult{Session: m.session}, nil
	}
	if m.session != "" && r.flaw == "a second start is an error" {
		return provisioning.StartBootstrapResult{}, errors.New("it runs")
	}
	m.started++
	m.session = provisioning.BootstrapSessionID(fmt.Sprintf("session-%s-%d", r.token(req.Key), m.started))
	if r.flaw == "the session holds a secret" {
		m.session += provisioning.BootstrapSessionID(req.Spec.SwarmJoin.JoinTokenRef)
	}
	session, sink := m.session, req.Sink
	if r.flaw == "close before join" {
		r.after(refJoin/2, func() { sink.Closed(session) })
	}
	r.after(refJoin, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		switch {
		case r.flaw == "joins are seen elsewhere":
		case r.flaw == "a destroyed node joins":
			sink.Joined(session, "agent")
		case !m.lives || m.ended || m.session != session:
		case r.flaw == "the join names another session":
			sink.Joined(session+"-x", "agent")
		case r.flaw == "the join names no agent":
			sink.Joined(session, "")
		default:
			sink.Joined(session, "agent")
		}
	})
	if r.flaw == "no session" {
		return provisioning.StartBootstrapResult{}, nil
	}
	return provisioning.StartBootstrapResult{Session: session}, nil
}

func (r *reference) BootstrapConvergenceObserved(ctx context.Context, req provisioning.BootstrapConvergenceObservedRequest) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.find(req.Key)
	if m == nil {
		return errors.New("no such machine")
	}
	if m.ended && r.flaw == "convergence is news only once" {
		return errors.New("no such session")
	}
	m.ended = true
	return nil
}

func (r *reference) CancelBootstrap(ctx context.Context, req provisioning.CancelBootstrapRequest) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.find(req.Key)
	if r.flaw == "cancel looks at an endpoint that it may not have" && req.Endpoint.Port == 0 {
		return errors.New("no port")
	}
	if r.flaw == "cancel ends the sessions of the slot" {
		for _, other := range r.machines {
			other.ended = other.ended || other.key.Node == req.Key.Node
		}
	}
	if m == nil || m.session != req.Session {
		if r.flaw == "an unknown session is an error" {
			return errors.New("no such session")
		}
		return nil
	}
	m.ended = true
	if r.flaw == "cancel takes the machine along" {
		m.lives, m.spent = false, true
	}
	return nil
}

func (r *reference) DestroyLease(ctx context.Context, req provisioning.DestroyLeaseRequest) error {
	if r.flaw == "destroy panics" {
		panic("index out of range")
	}
	lost := r.loses(req.Key, provisioning.DestroyLease)
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.machines[r.token(req.Key)]
	if m == nil || !m.lives {
		if m != nil && m.past && r.flaw == "destroy of what is forgotten is an error" {
			return errors.New("no such machine")
		}
		if m != nil && m.told && r.flaw == "destroy of what is gone is an error" {
			return errors.New("no such machine")
		}
		if m != nil {
			m.told = true
		}
		return nil
	}
	if r.flaw == "destroy takes the neighbours along" {
		for _, other := range r.machines {
			if other.key.Run == req.Key.Run && strings.HasPrefix(string(other.key.Node), string(req.Key.Node)) {
				other.lives, other.spent = false, true
			}
		}
		return nil
	}
	if r.flaw == "destroy takes the shorter names along" {
		for _, other := range r.machines {
			if other.key.Run == req.Key.Run && other.key.Attempt == req.Key.Attempt && strings.HasPrefix(string(req.Key.Node), string(other.key.Node)) {
				other.lives, other.spent = false, true
			}
		}
		return nil
	}
	if r.flaw == "destroy never ends" {
		return errors.New("still going")
	}
	if !m.going {
		m.going, m.ended = true, true
		r.after(refGoing, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			m.lives, m.going, m.spent = false, false, true
			m.also = 0
			r.after(refForget, func() { r.mu.Lock(); m.past = true; r.mu.Unlock() })
		})
	}
	if r.flaw == "destroy takes the slot along" {
		for _, other := range r.machines {
			if other.key.Node == req.Key.Node && other.lives && other != m {
				other.lives, other.spent = false, true
			}
		}
	}
	if lost && r.flaw == "an error of destroy is ignored" {
		return nil
	}
	if r.flaw == "accepted is gone" {
		return nil
	}
	return errors.New("still going")
}

// slowDestroy waits for the end of the machine instead of answering errors.
type slowDestroy struct{ *reference }

func (s slowDestroy) DestroyLease(ctx context.Context, req provisioning.DestroyLeaseRequest) error {
	for {
		if err := s.reference.DestroyLease(ctx, req); err == nil {
			return nil
		}
		tick := make(chan struct{})
		s.after(time.Second, func() { close(tick) })
		select {
		case <-tick:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (r *reference) live(key provisioning.ExternalKey) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.machines[r.token(key)]
	if m == nil {
		return 0, nil
	}
	if m.lives {
		return 1 + m.also, nil
	}
	return m.also, nil
}

// virtual is a clock that stands still unless it is advanced.
type virtual struct {
	mu     sync.Mutex
	now    time.Duration
	timers []timer
}

type timer struct {
	at time.Duration
	do func()
}

func (v *virtual) after(d time.Duration, do func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.timers = append(v.timers, timer{v.now + d, do})
	slices.SortStableFunc(v.timers, func(a, b timer) int { return cmp.Compare(a.at, b.at) })
}

func (v *virtual) advance(d time.Duration) {
	v.mu.Lock()
	end := v.now + d
	for len(v.timers) > 0 && v.timers[0].at <= end {
		next := v.timers[0]
		v.timers = v.timers[1:]
		v.now = next.at
		v.mu.Unlock()
		next.do()
		v.mu.Lock()
	}
	v.now = end
	v.mu.Unlock()
}

// report checks a reference with a flaw. It must be called in a bubble, where
// the kit's real time costs nothing.
func report(flaw string, change func(*Subject, *reference)) Report {
	return CheckReport(func() Subject {
		clock := new(virtual)
		r := &reference{flaw: flaw, after: clock.after, freed: make(chan struct{}), machines: make(map[string]*refMachine), lose: make(map[string]bool)}
		s := Subject{
			Backend: r,
			Group:   provisioning.NodeGroupSpec{SwarmJoin: provisioning.SwarmJoinTemplate{JoinTokenRef: "vault:swarm/join-token"}},
			Live:    r.live,
			Advance: clock.advance,
			Close:   func() { close(r.freed) },

			LoseAnswer: r.loseAnswer,
		}
		if change != nil {
			change(&s, r)
		}
		return s
	})
}

func rules(err error) []string {
	var broken *CheckError
	if !errors.As(err, &broken) {
		return nil
	}
	var names []string
	for _, f := range broken.Failures {
		names = append(names, f.Rule)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func TestCheckPassesReference(t *testing.T) {
	variants := map[string]func(*Subject, *reference){
		"as it is":                 nil,
		"destroy waits":            func(s *Subject, r *reference) { s.Backend = slowDestroy{r} },
		"in real time":             func(s *Subject, r *reference) { s.Advance = nil; r.after = realTime },
		"in real time, slowly":     func(s *Subject, r *reference) { s.Advance = nil; r.after = realTime; s.Backend = slowDestroy{r} },
		"nobody counts":            func(s *Subject, r *reference) { s.Live = nil },
		"a dead machine is named":  func(s *Subject, r *reference) { r.flaw = "a dead machine is named" },
		"joins are seen elsewhere": func(s *Subject, r *reference) { r.flaw = "joins are seen elsewhere" },
		"no answer can be lost":    func(s *Subject, r *reference) { s.LoseAnswer = nil },
		"its class is known":       func(s *Subject, r *reference) { s.Classes = []Class{Token} },
		"it has two classes":       func(s *Subject, r *reference) { s.Classes = []Class{Token, Name} },
	}
	notRun := map[string][]string{
		"in real time":         {"retry-later", "late-create-then-adopt", "late-create-then-destroy", "list-lag"},
		"in real time, slowly": {"retry-later", "late-create-then-adopt", "late-create-then-destroy", "list-lag"},
		"nobody counts": {"cut-create-then-retry", "late-create-then-adopt", "late-create-then-destroy", "list-lag",
			"adopt-after-destroy", "destroy-means-gone", "create-after-destroy", "spent-token"},
		"joins are seen elsewhere": {"join-before-close"},
		"no answer can be lost":    {"accepted-then-error"},
		"its class is known":       {"list-lag", "name-conflict"},
		"it has two classes":       {"list-lag"},
	}
	for name, change := range variants {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := report("", change)
				require.NoError(t, got.Err(), "%v", got)
				var skipped []string
				for _, c := range got.Cases {
					require.Empty(t, c.Left, c.Case)
					if c.NotRun != "" {
						skipped = append(skipped, c.Case)
					}
				}
				require.Equal(t, notRun[name], skipped)
			})
		})
	}
}

func realTime(d time.Duration, do func()) { time.AfterFunc(d, do) }

// fakeReport checks a fake whose script is the same for every attempt of every
// case. It must be called in a bubble.
func fakeReport(class Class, script func(*Backend, provisioning.LogicalNodeID)) Report {
	return CheckReport(func() Subject {
		b := New(Config{Class: class, Lag: 30 * time.Second, Settle: time.Minute, JoinAfter: 5 * time.Second})
		for _, c := range checkCases {
			for i := range 5 {
				script(b, provisioning.NewLogicalNodeID(provisioning.NodeGroupID(c.name), i))
			}
		}
		return Subject{
			Backend: b,
			Live:    func(key provisioning.ExternalKey) (int, error) { return b.LiveKey(key), nil },
			Advance: func(d time.Duration) { b.AdvanceTo(b.Now().Add(d)) },
			Close:   b.Close,

			LoseAnswer: func(key provisioning.ExternalKey, kind provisioning.OperationKind) {
				b.Script(key.Node, kind, DoneError())
			},
		}
	})
}

// A case is about something: each of the list that its rule promises is there,
// and each flaw below is found by the case that tells its story.
func TestCheckCases(t *testing.T) {
	for flaw, name := range map[string]string{
		"every create buys":                                     "create-twice",
		"a create that was cut off is sent anew":                "cut-create-then-retry",
		"a create that was answered with an error is sent anew": "accepted-then-error",
		"a lost answer is a Definite no":                        "accepted-then-error",
		"a list that lags is believed":                          "list-lag",
		"a list that lags is believed when adopting":            "list-lag",
		"a name that is cut":                                    "name-conflict",
		"a spent token gives its dead lease":                    "spent-token",
		"destroy of what is forgotten is an error":              "destroy-twice",
		"an address is remembered":                              "address-reuse",
		"cancel ends the sessions of the slot":                  "two-attempts",
		"a ctx that is done is a Definite no":                   "error-classes",
	} {
		t.Run(flaw, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var seenBy []string
				for _, c := range report(flaw, nil).Cases {
					require.NotEmpty(t, c.Why, c.Case)
					if c.Failures != nil {
						seenBy = append(seenBy, c.Case)
					}
				}
				require.Contains(t, seenBy, name)
			})
		})
	}
}

// The fake keeps the contract, also where the provider that it plays loses
// answers, is busy, or makes machines behind the backs of cut creates.
func TestCheckPassesFake(t *testing.T) {
	faults := map[string]func(*Backend, provisioning.LogicalNodeID){
		"none": func(*Backend, provisioning.LogicalNodeID) {},
		"lost answers": func(b *Backend, node provisioning.LogicalNodeID) {
			b.Script(node, create, DoneAmbiguous())
			b.Script(node, start, DoneAmbiguous())
			b.Script(node, destroy, DoneAmbiguous())
		},
		"late creates": func(b *Backend, node provisioning.LogicalNodeID) {
			b.Script(node, create, Late(20*time.Second))
		},
		"a busy provider": func(b *Backend, node provisioning.LogicalNodeID) {
			if node != "adopt-of-nothing-0" { // there the kit wants the very word
				b.Script(node, create, RetryAfter(5*time.Minute))
			}
			b.Script(node, cancel, Ambiguous())
			b.Script(node, destroy, RetryAfter(5*time.Minute))
		},
	}
	for _, class := range []Class{Token, Name, Label} {
		for fault, script := range faults {
			t.Run(class.String()+", "+fault, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					got := fakeReport(class, script)
					require.NoError(t, got.Err(), "%v", got)
					for _, c := range got.Cases {
						require.Empty(t, c.NotRun, c.Case)
						require.Empty(t, c.Left, c.Case)
					}
				})
			})
		}
	}
}

// What the fake plays when it is told to break the contract, the kit finds.
func TestCheckFindsFaultsOfFake(t *testing.T) {
	for fault, c := range map[string]struct {
		rule   string
		script func(*Backend, provisioning.LogicalNodeID)
	}{
		"slow creates look at no context": {"B7", func(b *Backend, node provisioning.LogicalNodeID) {
			b.Script(node, create, Slow(15*time.Second))
		}},
		"a panic": {Contract, func(b *Backend, node provisioning.LogicalNodeID) {
			b.Script(node, destroy, DonePanic())
		}},
	} {
		t.Run(fault, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := fakeReport(Token, c.script)
				require.Equal(t, []string{c.rule}, rules(got.Err()), "%v", got)
			})
		})
	}
}

// expectBroken checks references with flaws: the kit must name the rule, and
// beside it just what the list of the flaw says.
func expectBroken(t *testing.T, rule string, flaws map[string][]string) {
	for flaw, also := range flaws {
		t.Run(flaw, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := report(flaw, nil)
				require.ElementsMatch(t, append(also, rule), rules(got.Err()), "%v", got)
			})
		})
	}
}

func TestBackend_B1Broken(t *testing.T) {
	expectBroken(t, "B1", map[string][]string{
		"every start begins anew":                               nil,
		"a second start is an error":                            nil,
		"a second create buys under the same lease":             {"B2"}, // also where it comes later
		"every create buys":                                     {"B2"}, // also where a retry comes later
		"a create that was cut off is sent anew":                nil,
		"a create that was answered with an error is sent anew": nil,
	})
}

func TestBackend_B2Broken(t *testing.T) {
	expectBroken(t, "B2", map[string][]string{
		"the zone follows the hour":    nil,
		"the token goes with the hour": nil,
	})
}

func TestBackend_B3Broken(t *testing.T) {
	expectBroken(t, "B3", map[string][]string{
		"adopt looks at the list only":               nil,
		"a cut create is Definite":                   nil,
		"a lost create is sent under another token":  nil,
		"a list that lags is believed":               nil,
		"a list that lags is believed when adopting": nil,
	})
}

func TestBackend_B4Broken(t *testing.T) {
	expectBroken(t, "B4", map[string][]string{
		"adopt buys":                        nil,
		"adopt buys and keeps it to itself": nil,
		"adopt answers a plain Definite":    nil,
		"adopt finds nothing":               nil,
		"a spent key is adopted anew":       nil,
	})
}

func TestBackend_B5Broken(t *testing.T) {
	expectBroken(t, "B5", map[string][]string{
		"an unknown session is an error":           nil,
		"destroy of what is gone is an error":      nil,
		"destroy of what is forgotten is an error": nil,
	})
}

func TestBackend_B6Broken(t *testing.T) {
	expectBroken(t, "B6", map[string][]string{
		"accepted is gone":               nil,
		"destroy never ends":             nil,
		"a destroyed node joins":         nil,
		"an error of destroy is ignored": nil,
	})
}

func TestBackend_B7Broken(t *testing.T) {
	expectBroken(t, "B7", map[string][]string{
		"create hangs":                       nil,
		"start hangs":                        nil,
		"a cut create is Definite and there": {"B3"},
	})
}

func TestBackend_B8Broken(t *testing.T) {
	expectBroken(t, "B8", map[string][]string{
		"a key without its attempt":          nil,
		"a key without its run":              nil,
		"a key that runs together":           nil,
		"a key that takes w-10 for w-1":      nil,
		"adopt takes a neighbour":            nil,
		"calls share a variable":             nil,
		"destroy takes the neighbours along": nil,

		"a longer name is taken for its beginning": nil,
		"destroy takes the shorter names along":    nil,
		"a name that is cut":                       nil,
		"a name in lower case":                     nil,
		"a name without what cannot be in it":      nil,
		"cancel ends the sessions of the slot":     nil,
		"destroy takes the slot along":             nil,
		"an address is remembered":                 nil,
		"a start just connects to the address":     nil,
	})
}

func TestBackend_B9Broken(t *testing.T) {
	expectBroken(t, "B9", map[string][]string{
		"the lease holds a secret":   nil,
		"the session holds a secret": nil,
	})
}

func TestBackend_B10Broken(t *testing.T) {
	expectBroken(t, "B10", map[string][]string{
		"close before join":              nil,
		"the join names another session": nil,
	})
}

func TestBackend_B11Broken(t *testing.T) {
	expectBroken(t, "B11", map[string][]string{
		"a spent key buys again":             nil,
		"a spent token gives its dead lease": nil,
	})
}

func TestBackend_ContractBroken(t *testing.T) {
	expectBroken(t, Contract, map[string][]string{
		"no lease":                            nil,
		"no session":                          nil,
		"no capacity":                         nil,
		"never answers":                       nil,
		"create panics":                       nil,
		"create leaves its goroutine":         nil,
		"destroy panics":                      nil,
		"convergence is news only once":       nil,
		"a ctx that is done is a Definite no": nil,
		"a look-up that is cut off loses the machine":      nil,
		"a lost answer is a Definite no":                   nil,
		"gone is not yet":                                  nil,
		"an endpoint without a host":                       nil,
		"an endpoint without a port":                       nil,
		"a create answers half an endpoint":                nil,
		"the join names no agent":                          nil,
		"cancel takes the machine along":                   nil,
		"cancel looks at an endpoint that it may not have": nil,
	})
}

// NotStarted promises that the provider never heard of the create, and the driver
// forgets about it. Whoever says so of one that bought is found out, whether or
// not anybody counts machines or moves the time on.
func TestCheckDoubtsNotStarted(t *testing.T) {
	for _, flaw := range []string{
		"a ctx that is done buys and is NotStarted", "the first create buys and is NotStarted",
		"a cut create is NotStarted", "a lost answer is NotStarted",
	} {
		for name, change := range map[string]func(*Subject, *reference){
			"as it is":      nil,
			"nobody counts": func(s *Subject, r *reference) { s.Live = nil },
			"in real time":  func(s *Subject, r *reference) { s.Advance = nil; r.after = realTime },
			"nobody counts, in real time": func(s *Subject, r *reference) {
				s.Live, s.Advance, r.after = nil, nil, realTime
			},
		} {
			t.Run(flaw+", "+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					got := report(flaw, change)
					require.Equal(t, []string{Contract}, rules(got.Err()), "%v", got)
					require.Contains(t, got.Err().Error(), "every create of a key was answered NotStarted, and ")
					for _, c := range got.Cases {
						require.Empty(t, c.Left, c.Case)
					}
				})
			})
		}
	}
}

// One that gives up before the provider hears of it says so rightly.
func TestCheckBelievesNotStarted(t *testing.T) {
	for name, change := range map[string]func(*Subject, *reference){
		"as it is":      func(*Subject, *reference) {},
		"nobody counts": func(s *Subject, r *reference) { s.Live = nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := report("", func(s *Subject, r *reference) {
					change(s, r)
					s.Backend = provisioning.RateLimited(s.Backend, open{})
				})
				require.NoError(t, got.Err(), "%v", got)
			})
		})
	}
}

// open is a limiter that lets everybody through who is still there.
type open struct{}

func (open) Wait(ctx context.Context) error { return ctx.Err() }

func TestCheckSubject(t *testing.T) {
	boom := errors.New("boom")
	for name, change := range map[string]func(*Subject, *reference){
		"no backend":     func(s *Subject, r *reference) { s.Backend = nil },
		"no valid group": func(s *Subject, r *reference) { s.Group.Shape.DiskGB = -1 },
		"live fails": func(s *Subject, r *reference) {
			s.Live = func(provisioning.ExternalKey) (int, error) { return 0, boom }
		},
		"live panics":      func(s *Subject, r *reference) { s.Live = func(provisioning.ExternalKey) (int, error) { panic(boom) } },
		"advance panics":   func(s *Subject, r *reference) { s.Advance = func(time.Duration) { panic(boom) } },
		"close panics":     func(s *Subject, r *reference) { s.Close = func() { panic(boom) } },
		"patience too low": func(s *Subject, r *reference) { s.Patience = time.Millisecond },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := report("", change)
				require.Contains(t, rules(got.Err()), Contract, "%v", got)
			})
		})
	}
}

// A subject that is of no use to any case is told about once, and as an error.
func TestCheckWithoutASubject(t *testing.T) {
	for name, c := range map[string]struct {
		newSubject func() Subject
		problem    string
	}{
		"nothing":    {nil, "the subject: panic: newSubject is nil"},
		"a panic":    {func() Subject { panic("boom") }, "the subject: panic: boom"},
		"no backend": {func() Subject { return Subject{} }, "the subject has no backend"},
		"no valid group": {func() Subject {
			s := Subject{Backend: New(Config{})}
			s.Group.Shape.DiskGB = -1
			return s
		}, "the subject: panic: Subject.Group: "},
	} {
		t.Run(name, func(t *testing.T) {
			report := CheckReport(c.newSubject)
			var broken *CheckError
			require.ErrorAs(t, report.Err(), &broken)
			require.Len(t, broken.Failures, 1)
			require.Equal(t, Contract, broken.Failures[0].Rule)
			require.Contains(t, broken.Failures[0].Problem, c.problem)
			require.Len(t, report.Cases, len(checkCases))
			for _, later := range report.Cases[1:] {
				require.Equal(t, "the subject is of no use, as told above", later.NotRun)
			}
			require.Contains(t, report.String(), fmt.Sprintf("\n0 passed, 1 failed, %d not run\n", len(checkCases)-1))
		})
	}
}

// A machine that goes with its session is missed also where nobody counts.
func TestCheckMissesTheMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got := report("cancel takes the machine along", func(s *Subject, r *reference) { s.Live = nil })
		require.Equal(t, []string{Contract}, rules(got.Err()), "%v", got)
		require.Contains(t, got.Err().Error(), "the machine was gone after CancelBootstrap")
	})
}

// What could not be given back is listed: somebody pays for it.
func TestCheckTellsWhatIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got := report("destroy never ends", nil)
		require.Len(t, got.Cases[0].Left, 1)
		require.Equal(t, provisioning.LogicalNodeID("walk-0"), got.Cases[0].Left[0].Node)
		require.Contains(t, got.String(), "may be left behind: walk-0 of run check-")
	})
}

// A report reads like a lesson: why, what was seen, what to do instead.
func TestCheckReportTeaches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		text := report("destroy of what is gone is an error", func(s *Subject, r *reference) { s.Classes = []Class{Token} }).String()
		require.Contains(t, text, "\nFAILED  B5       destroy-twice\n"+
			"        why      a destroy whose answer is lost is sent again, and a machine can go without us; an error for what is absent keeps the slot from ever being used again\n"+
			"        seen     B5: DestroyLease of a machine that is gone answered Definite error \"no such machine\"\n"+
			"        instead  take \"not found\" of a destroy for success: the answer to the first may have been lost\n"+
			"ok      B5       cancel-absent\n")
		require.Contains(t, text, "\nnot run B8       name-conflict: is about providers of class name\n")
		require.Regexp(t, `\n\d+ passed, 1 failed, 2 not run\n$`, text)
	})
}

func TestCheckErrorTellsAFaultOnce(t *testing.T) {
	err := Report{Cases: []CaseResult{
		{Rule: "B5", Case: "destroy-twice", Failures: []Failure{{Rule: "B6", Case: "destroy-twice", Problem: "it lives", Lesson: "see it go"}}},
		{Rule: "B6", Case: "destroy-means-gone", Failures: []Failure{{Rule: "B6", Case: "destroy-means-gone", Problem: "it lives", Lesson: "see it go"}}},
		{Rule: "B9", Case: "no-secrets"},
	}}.Err()
	require.EqualError(t, err, "fakebackend: the backend breaks its contract\n"+
		"  B6 (destroy-twice, destroy-means-gone): it lives\n      see it go")

	// A case that meets a failure again and again saw it in one place.
	seen := Failure{Rule: "B1", Case: "at-once", Problem: "two machines", Lesson: "adopt"}
	err = Report{Cases: []CaseResult{
		{Rule: "B1", Case: "at-once", Failures: []Failure{seen, {Rule: "B7", Case: "at-once", Problem: "it hangs", Lesson: "end"}, seen, seen}},
		{Rule: "B4", Case: "adopt", Failures: []Failure{{Rule: "B1", Case: "adopt", Problem: "two machines", Lesson: "adopt"}}},
	}}.Err()
	require.EqualError(t, err, "fakebackend: the backend breaks its contract\n"+
		"  B1 (at-once, adopt): two machines\n      adopt\n"+
		"  B7 (at-once): it hangs\n      end")
}
