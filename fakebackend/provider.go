package fakebackend

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/swactor/provisioning"
)

// Class is how a provider tells a repeated create from a new one. It decides
// what becomes of a create that lands late ([Late]) while others are made.
type Class uint8

const (
	// Token: creates carry a request token, and the same token always gives
	// the same machine. Any later answer to a create of the key, AdoptOnly or
	// not, voids a late one.
	Token Class = iota
	// Name: a machine has a name that exists once. A second create makes the
	// machine and so voids the late one; until that has landed, an AdoptOnly
	// create is answered Ambiguous.
	Name
	// Label: nothing but labels tells machines apart, and the list may lag
	// (Config.Lag). Nothing voids a late create; it lands. Only waiting
	// (Config.Settle) keeps a second machine from being made.
	Label
)

var classNames = [...]string{"token", "name", "label"}

// String returns "token", "name" or "label".
func (c Class) String() string {
	if int(c) < len(classNames) {
		return classNames[c]
	}
	return fmt.Sprintf("unknown(%d)", c)
}

// ParseClass reads what Class.String writes.
func ParseClass(text string) (Class, error) {
	if i := slices.Index(classNames[:], text); i >= 0 {
		return Class(i), nil
	}
	return 0, fmt.Errorf("fakebackend: unknown class %q", text)
}

// Machine is one live machine, as the provider knows it.
type Machine struct {
	Key      provisioning.ExternalKey
	Lease    provisioning.ProviderLeaseID
	Endpoint provisioning.SSHEndpoint
	// CreatedAt is when it came to exist.
	CreatedAt time.Time
	// Late: it was made by a create that had been answered before.
	Late bool
	// Dead: of no use, and billed.
	Dead bool
}

// machine is one that exists or existed.
type machine struct {
	Machine
	number int // of its key, from 1; the order of the lease ids
}

// session is one bootstrap of a key. It lives on a machine and ends with it.
type session struct {
	id      provisioning.BootstrapSessionID
	lease   provisioning.ProviderLeaseID
	swactor provisioning.SwactorID
	sink    provisioning.BootstrapSink // of the newest start
	ended   bool
}

// account is what the provider knows of one key. It is kept for good: counts
// are asked for when everything is gone.
type account struct {
	key       provisioning.ExternalKey
	machines  []*machine // live, in the order of their numbers
	session   *session   // the newest, also when it has ended
	sessions  int
	landings  []*event // creates that are still to land
	created   int
	destroyed int
	running   int // calls that have not returned
	// lastBuy is when the last create that can have bought did so. It starts
	// the settle time (B3); zero: none.
	lastBuy time.Time
}

func (b *Backend) account(key provisioning.ExternalKey) *account {
	a := b.accounts[key]
	if a == nil {
		a = &account{key: key}
		b.accounts[key] = a
		s := b.slot(key.Node)
		s.accounts = append(s.accounts, a)
	}
	return a
}

// visible returns the machines that a look for this key finds now: all of
// them but those that a lagging list does not show yet.
func (b *Backend) visible(a *account) []*machine {
	var found []*machine
	for _, m := range a.machines {
		if b.config.Class != Label || !b.now.Before(m.CreatedAt.Add(b.config.Lag)) {
			found = append(found, m)
		}
	}
	return found
}

// settling reports whether the provider has not yet settled on what exists for
// a key. Until then there are no final answers (B3).
func (b *Backend) settling(a *account) bool {
	return !a.lastBuy.IsZero() && b.now.Before(a.lastBuy.Add(b.config.Settle))
}

// buy makes a machine.
func (b *Backend) buy(a *account, isLate bool) *machine {
	a.created++
	m := &machine{number: a.created, Machine: Machine{
		Key: a.key, Lease: leaseID(a.key, a.created), Endpoint: endpointOf(a.key.Node), CreatedAt: b.now, Late: isLate,
	}}
	a.machines = append(a.machines, m)
	b.leases[m.Lease] = a.key
	if b.config.Class != Label {
		a.voidLandings() // the token or the name is taken
	}
	return m
}

// remove ends a machine and the session on it.
func (a *account) remove(m *machine) {
	a.machines = slices.DeleteFunc(a.machines, func(other *machine) bool { return other == m })
	if a.session != nil && a.session.lease == m.Lease {
		a.session.ended = true
	}
}

// removeAll ends every machine of the key and returns how many there were.
func (a *account) removeAll() int {
	n := len(a.machines)
	for _, m := range slices.Clone(a.machines) {
		a.remove(m)
	}
	return n
}

func (a *account) voidLandings() {
	for _, e := range a.landings {
		e.void()
	}
	a.landings = nil
}

// landLater lets a create take effect d from now.
func (b *Backend) landLater(a *account, d time.Duration) {
	var e *event
	e = b.schedule(d, func() {
		a.landings = slices.DeleteFunc(a.landings, func(other *event) bool { return other == e })
		// A token or a name is voided by the machine that has it. Labels
		// prevent nothing.
		if b.config.Class == Label || len(a.machines) == 0 {
			b.buy(a, true)
		}
	})
	a.landings = append(a.landings, e)
}

// adopt returns the machine that a create or a look for the key comes upon,
// or nil. Of several it keeps the lowest id and destroys the rest (B8).
func (b *Backend) adopt(a *account) *machine {
	found := b.visible(a)
	if found == nil {
		return nil
	}
	for _, m := range found[1:] {
		a.remove(m)
		a.destroyed++
	}
	return found[0]
}

// live returns the session of the account if it has not ended.
func (a *account) live() *session {
	if a.session == nil || a.session.ended {
		return nil
	}
	return a.session
}

// begin starts the bootstrap of a machine, or adopts the one that runs (B1).
// Whoever asked last is told what happens.
func (b *Backend) begin(a *account, m *machine, sink provisioning.BootstrapSink) *session {
	if s := a.live(); s != nil {
		s.sink = sink
		return s
	}
	a.sessions++
	s := &session{id: sessionID(a.key, a.sessions), lease: m.Lease, swactor: SwactorID(a.key), sink: sink}
	a.session = s
	b.sessions[s.id] = a.key
	switch {
	case b.config.ManualBootstrap:
	case b.config.JoinAfter == 0:
		b.join(s)
	default:
		for i, stage := range joinStages {
			at := b.config.JoinAfter / time.Duration(len(joinStages)) * time.Duration(i)
			b.schedule(at, func() { b.progress(s, stage, uint64(i+1)) })
		}
		b.schedule(b.config.JoinAfter, func() { b.join(s) })
	}
	return s
}

// joinStages are reported on the way to a join that takes time.
var joinStages = [...]provisioning.BootstrapStage{
	provisioning.BootstrapStageCreated, provisioning.BootstrapStageSSHConnecting, provisioning.BootstrapStageSSHReady,
	provisioning.BootstrapStageStdoutStreaming, provisioning.BootstrapStageBootChecking,
	provisioning.BootstrapStageSwactorStarting, provisioning.BootstrapStageWaitingForSwactorJoin,
}

func (b *Backend) progress(s *session, stage provisioning.BootstrapStage, line uint64) {
	if sink := s.sink; !s.ended {
		b.outbox = append(b.outbox, func() { sink.Progress(s.id, stage, line, 0) })
	}
}

func (b *Backend) join(s *session) {
	if sink := s.sink; !s.ended {
		b.outbox = append(b.outbox, func() { sink.Joined(s.id, s.swactor) })
	}
}

// loseLater ends a machine d from now, with a word to its bootstrap or
// without.
func (b *Backend) loseLater(a *account, m *machine, d time.Duration, announced bool) {
	b.schedule(d, func() {
		if !slices.Contains(a.machines, m) {
			return
		}
		a.remove(m)
		if s := a.session; announced && s != nil && s.lease == m.Lease {
			sink := s.sink
			b.outbox = append(b.outbox, func() { sink.NodeLost("fakebackend: the spot machine was taken back") })
		}
	})
}

// The ids are made of the key alone. Neither run nor node holds a '/', so no
// two keys share one.

func leaseID(key provisioning.ExternalKey, number int) provisioning.ProviderLeaseID {
	return provisioning.ProviderLeaseID(idText("lease", key, number))
}

func sessionID(key provisioning.ExternalKey, number int) provisioning.BootstrapSessionID {
	return provisioning.BootstrapSessionID(idText("session", key, number))
}

func idText(what string, key provisioning.ExternalKey, number int) string {
	text := what + "/" + string(key.Run) + "/" + string(key.Node) + "/" + strconv.FormatUint(uint64(key.Attempt), 10)
	if number > 1 {
		text += "/" + strconv.Itoa(number)
	}
	return text
}

// SwactorID returns the name under which the agent of a key joins.
func SwactorID(key provisioning.ExternalKey) provisioning.SwactorID {
	return provisioning.SwactorID(idText("swactor", key, 1))
}

// endpointOf gives every machine of a slot the same address, as providers do
// with the address of a dead machine.
func endpointOf(node provisioning.LogicalNodeID) provisioning.SSHEndpoint {
	return provisioning.SSHEndpoint{Host: string(node) + ".test", Port: 22}
}

func compareMachines(x, y Machine) int {
	return cmp.Or(cmp.Compare(x.Key.Run, y.Key.Run), cmp.Compare(x.Key.Node, y.Key.Node),
		cmp.Compare(x.Key.Attempt, y.Key.Attempt), x.CreatedAt.Compare(y.CreatedAt), cmp.Compare(x.Lease, y.Lease))
}
