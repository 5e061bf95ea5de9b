package fakebackend

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/swactor/provisioning"
)

// call is one call of the backend, from its start to its return.
type call struct {
	kind      provisioning.OperationKind
	key       provisioning.ExternalKey
	operation provisioning.OperationID
	adoptOnly bool
	lease     provisioning.ProviderLeaseID
	session   provisioning.BootstrapSessionID
	endpoint  provisioning.SSHEndpoint
	sink      provisioning.BootstrapSink

	// done: the effect has happened. result is what it came to, made the
	// machine of a create.
	done   bool
	result answer
	made   *machine

	// Of a call that blocks: hanging until released, or slow until wake.
	hanging  bool
	wake     *event
	piece    bool // a Work waits for it
	answer   answer
	answered chan answer
}

// answer is what a call returns: a result, an error or a panic.
type answer struct {
	lease    provisioning.ProviderLeaseID
	endpoint *provisioning.SSHEndpoint
	session  provisioning.BootstrapSessionID
	err      error
	panics   bool
}

// serve plays one call.
func (b *Backend) serve(ctx context.Context, c *call) answer {
	if err := ctx.Err(); err != nil {
		return answer{err: provisioning.NotStarted(err)} // B7: it never reached the provider
	}
	b.mu.Lock()
	s := b.slot(c.key.Node)
	var o Outcome
	if queue := s.scripts[c.kind]; len(queue) > 0 {
		o, s.scripts[c.kind] = queue[0], queue[1:]
	}
	if o.word == refuse {
		b.mu.Unlock()
		return answer{err: provisioning.NotStarted(errRefused)}
	}
	s.callTimes[c.kind] = append(s.callTimes[c.kind], b.now)
	a := b.account(c.key)
	start := Call{Kind: c.kind, Key: c.key, Operation: c.operation, AdoptOnly: c.adoptOnly, Outcome: o, StartedAt: b.now, Others: a.running}
	a.running++
	if b.config.OnCall != nil {
		b.mu.Unlock()
		b.config.OnCall(start)
		b.mu.Lock()
	}
	result := b.play(c, o)
	blocks := c.answered != nil
	piece := c.piece
	b.unlockAndReport()
	if blocks {
		if piece {
			b.idle <- struct{}{}
		}
		result = <-c.answered
	}
	b.mu.Lock()
	a.running--
	b.mu.Unlock()
	if result.panics {
		panic(fmt.Sprintf("fakebackend: scripted panic of %v on %s", c.kind, c.key.Node))
	}
	return result
}

// unlockAndReport frees the lock and makes the reports that came up under it:
// sinks are foreign code.
func (b *Backend) unlockAndReport() {
	reports := b.outbox
	b.outbox = nil
	b.mu.Unlock()
	for _, report := range reports {
		report()
	}
}

// play lets a call with this outcome begin: it has its answer afterwards, or
// it is blocked. The lock is held.
func (b *Backend) play(c *call, o Outcome) answer {
	if !o.blocks() {
		return b.conclude(c, o)
	}
	if o.word == doneHang || o.word == doneSlow {
		c.result = b.conclude(c, OK())
		c.done = true
	}
	if b.closed {
		return b.conclude(c, Ambiguous())
	}
	if o.word == slow || o.word == doneSlow {
		c.wake = b.schedule(o.after, func() { b.unblock(c, OK()) })
		c.wake.wakes = c
	} else {
		c.hanging = true
	}
	c.answered = make(chan answer, 1)
	c.piece, b.working = b.working, false
	b.blocked = append(b.blocked, c)
	return answer{}
}

// unblock puts the answer of a blocked call in place. The lock is held;
// [Backend.resume] follows without it.
func (b *Backend) unblock(c *call, o Outcome) {
	b.blocked = slices.DeleteFunc(b.blocked, func(other *call) bool { return other == c })
	c.answer = b.conclude(c, o)
}

// resume lets an unblocked call return. If it is a piece of work, resume waits
// until that has finished or blocks again.
func (b *Backend) resume(c *call) {
	if !c.piece {
		c.answered <- c.answer
		return
	}
	b.mu.Lock()
	b.working = true
	b.mu.Unlock()
	c.answered <- c.answer
	<-b.idle
}

// ErrNotHanging is returned by [Backend.Release] when there is nothing to
// release.
var ErrNotHanging = errors.New("fakebackend: no such call hangs")

// Release lets the oldest hanging call of an operation on a slot end with an
// outcome, and of a call run by a [Work] waits until that has finished or
// blocks again. It returns [ErrNotHanging] if there is none, and refuses
// outcomes that do not fit or do not end a call.
func (b *Backend) Release(node provisioning.LogicalNodeID, kind provisioning.OperationKind, o Outcome) error {
	b.outsideOfWork("Release")
	if err := o.Fits(kind); err != nil {
		return err
	}
	if o.blocks() || o.word == refuse {
		return fmt.Errorf("fakebackend: outcome %v does not end a call", o)
	}
	b.mu.Lock()
	i := slices.IndexFunc(b.blocked, func(c *call) bool { return c.hanging && c.kind == kind && c.key.Node == node })
	if i < 0 {
		b.mu.Unlock()
		return fmt.Errorf("%w: %v on %s", ErrNotHanging, kind, node)
	}
	c := b.blocked[i]
	b.unblock(c, o)
	b.unlockAndReport()
	b.resume(c)
	return nil
}

// Hanging returns how many calls of an operation on a slot wait to be
// released.
func (b *Backend) Hanging(node provisioning.LogicalNodeID, kind provisioning.OperationKind) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, c := range b.blocked {
		if c.hanging && c.kind == kind && c.key.Node == node {
			n++
		}
	}
	return n
}

// Close lets every blocked call end Ambiguous, as calls do whose process goes
// away, and lets none block from now on. No goroutine of a call outlives it.
func (b *Backend) Close() {
	b.outsideOfWork("Close")
	for {
		b.mu.Lock()
		b.closed = true
		if len(b.blocked) == 0 {
			b.mu.Unlock()
			return
		}
		c := b.blocked[0]
		if c.wake != nil {
			c.wake.void()
		}
		b.unblock(c, Ambiguous())
		b.unlockAndReport()
		b.resume(c)
	}
}

// conclude lets an outcome that does not block take place and returns the
// answer. The lock is held.
func (b *Backend) conclude(c *call, o Outcome) answer {
	if c.kind == provisioning.CreateLease {
		return b.create(c, o)
	}
	a := b.account(c.key)
	if o.word == lost {
		a.removeAll()
		a.voidLandings()
		if c.kind == provisioning.DestroyLease && b.settling(a) {
			return answer{err: provisioning.Ambiguous(errNotSettled)} // B3
		}
		return answer{err: provisioning.LeaseLost(errLost)}
	}
	if o.word == late {
		b.schedule(o.after, func() {
			// A bootstrap that runs by then keeps its newer sink.
			if c.kind != provisioning.StartBootstrap || a.live() == nil {
				b.effect(c)
			}
		})
	}
	if o.effective() && !c.done {
		c.result, c.done = b.effect(c), true
	}
	if failed, ok := failure(o); ok {
		return failed
	}
	result := c.result
	if result.err == nil {
		switch o.word {
		case notReady:
			result.endpoint = nil
		case spotLoss:
			if m := a.machine(c.lease); m != nil {
				b.loseLater(a, m, o.after, true)
			}
		}
	}
	return result
}

// create is conclude for CreateLease.
func (b *Backend) create(c *call, o Outcome) answer {
	a := b.account(c.key)
	unsettled := b.settling(a) // by earlier creates, not by this one
	if b.config.Class == Token && o.word != panics {
		a.voidLandings()
	}
	if o.word == lost {
		a.removeAll()
		a.voidLandings()
		if unsettled {
			return answer{err: provisioning.Ambiguous(errNotSettled)} // B3
		}
		return answer{err: provisioning.LeaseLost(errLost)}
	}
	m := c.made
	if m == nil {
		m = b.adopt(a) // B1
	}
	switch {
	case m != nil || c.done || c.adoptOnly: // nothing to make (B4)
	case unsettled && b.config.Class == Label:
		// A machine that cannot be seen yet may be there: a second one must
		// not be made (B3).
	case o.word == late:
		b.landLater(a, o.after)
		a.lastBuy = b.now
	case o.effective():
		m = b.buy(a, false)
		a.lastBuy = b.now
	case o.word == unclassified || o.word == ambiguous || o.word == panics:
		a.lastBuy = b.now // nothing was bought, and nobody can know
	}
	c.made = m
	final := !unsettled && len(a.landings) == 0 && len(a.machines) == 0
	if failed, ok := failure(o); ok && (m == nil || !o.refuses()) {
		if o.refuses() && !final {
			failed.err = provisioning.Ambiguous(errNotSettled) // B3
			if o.word == retryAfter {
				failed.err = provisioning.RetryAfter(failed.err, o.after)
			}
		}
		return failed
	}
	if m == nil {
		if c.adoptOnly && final {
			return answer{err: provisioning.ErrNothingToAdopt}
		}
		return answer{err: provisioning.Ambiguous(errNotSettled)}
	}
	if o.word == dead {
		m.Dead = true
	}
	if m.Dead {
		return answer{err: provisioning.LeaseLostWith(m.Lease, errDead)} // B11
	}
	if o.word == vanish || o.word == spotLoss {
		b.loseLater(a, m, o.after, o.word == spotLoss)
	}
	if o.word == okNoEndpoint {
		return answer{lease: m.Lease}
	}
	return answer{lease: m.Lease, endpoint: &m.Endpoint}
}

var (
	errRefused      = errors.New("fakebackend: scripted refusal of the submission")
	errDefinite     = errors.New("fakebackend: scripted definite failure")
	errCapacity     = errors.New("fakebackend: no capacity")
	errThrottled    = errors.New("fakebackend: scripted throttling")
	errUnclassified = errors.New("fakebackend: scripted error of no class")
	errAmbiguous    = errors.New("fakebackend: scripted loss of the answer")
	errLost         = errors.New("fakebackend: the machine of this key is gone")
	errDead         = errors.New("fakebackend: the machine of this key is dead and still billed")
	errNotSettled   = errors.New("fakebackend: an earlier create of this key may still take effect")
)

// refuses reports whether the answer is a definite no.
func (o Outcome) refuses() bool {
	return o.word == definite || o.word == capacity || o.word == retryAfter
}

// failure returns the answer of an outcome that fails whatever its effect came
// to.
func failure(o Outcome) (answer, bool) {
	switch o.word {
	case definite:
		return answer{err: provisioning.Definite(errDefinite)}, true
	case capacity:
		return answer{err: provisioning.Definite(errCapacity)}, true
	case retryAfter:
		return answer{err: provisioning.RetryAfter(provisioning.Definite(errThrottled), o.after)}, true
	case unclassified, doneError:
		return answer{err: errUnclassified}, true
	case ambiguous, doneAmbiguous, late:
		return answer{err: provisioning.Ambiguous(errAmbiguous)}, true
	case panics, donePanics:
		return answer{panics: true}, true
	}
	return answer{}, false
}

// effect does what a call is for and returns the answer if nothing goes wrong.
// What does not exist, or belongs to another key, is a definite error, except
// where absence is what was asked for (B5).
func (b *Backend) effect(c *call) answer {
	a := b.account(c.key)
	definitely := func(format string, args ...any) answer {
		return answer{err: provisioning.Definite(fmt.Errorf("fakebackend: "+format, args...))}
	}
	m := a.machine(c.lease)
	switch c.kind {
	case provisioning.LookupEndpoint, provisioning.StartBootstrap, provisioning.BootstrapConvergenceObserved:
		if m == nil {
			return definitely("%v: key %s has no machine under lease %q", c.kind, c.key.Token(), c.lease)
		}
		if m.Dead {
			return answer{err: provisioning.LeaseLost(errDead)}
		}
	}
	switch c.kind {
	case provisioning.LookupEndpoint:
		return answer{endpoint: &m.Endpoint}
	case provisioning.StartBootstrap:
		if c.endpoint != m.Endpoint {
			return definitely("%v: lease %q answers at %v, not at %v", c.kind, c.lease, m.Endpoint, c.endpoint)
		}
		return answer{session: b.begin(a, m, c.sink).id}
	case provisioning.BootstrapConvergenceObserved:
		if s := a.live(); s == nil || s.id != c.session {
			return definitely("%v: key %s has no session %q", c.kind, c.key.Token(), c.session)
		}
	case provisioning.CancelBootstrap:
		if owner, known := b.sessions[c.session]; known && owner != c.key {
			return definitely("%v: session %q belongs to another key", c.kind, c.session) // B8
		}
		if s := a.live(); s != nil && s.id == c.session {
			s.ended = true
		}
	case provisioning.DestroyLease:
		if owner, known := b.leases[c.lease]; known && owner != c.key {
			return definitely("%v: lease %q belongs to another key", c.kind, c.lease) // B8
		}
		a.destroyed += a.removeAll()
		if s := a.live(); s != nil {
			s.ended = true // B6
		}
		if b.settling(a) || len(a.landings) > 0 {
			return answer{err: provisioning.Ambiguous(errNotSettled)} // B3
		}
	}
	return answer{}
}

func (a *account) machine(lease provisioning.ProviderLeaseID) *machine {
	for _, m := range a.machines {
		if m.Lease == lease {
			return m
		}
	}
	return nil
}

// Refusing returns an executor that refuses the submissions for which
// [Refuse] is next in the script, and passes everything else to inner.
func (b *Backend) Refusing(inner provisioning.EffectExecutor) provisioning.EffectExecutor {
	return &refusing{EffectExecutor: inner, backend: b}
}

type refusing struct {
	provisioning.EffectExecutor
	backend *Backend
}

func (r *refusing) Submit(effect provisioning.Effect) (bool, error) {
	if r.backend.takeRefusal(effect.Key.Node, effect.Kind) {
		return false, errRefused
	}
	return r.EffectExecutor.Submit(effect)
}

func (b *Backend) takeRefusal(node provisioning.LogicalNodeID, kind provisioning.OperationKind) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.slot(node)
	queue := s.scripts[kind]
	if len(queue) == 0 || queue[0].word != refuse {
		return false
	}
	s.scripts[kind] = queue[1:]
	return true
}
