package fakebackend

import (
	"errors"
	"fmt"
	"time"

	"github.com/swactor/provisioning"
)

// checkCases are the cases in the order of their rules. A case tells one
// story; attempts that it leaves behind are taken down after it.
var checkCases = []checkCase{
	{rule: Contract, name: "walk", run: checkWalk},
	{rule: "B1", name: "create-twice", run: checkCreateTwice,
		lesson: "look for the machine of this ExternalKey first, or send its Token as the provider's idempotency token, and return the lease that is there"},
	{rule: "B1", name: "start-twice", run: checkStartTwice,
		lesson: "look for the bootstrap of this ExternalKey first and return its session"},
	{rule: "B2", name: "retry-later", needAdvance: true, run: checkRetryLater,
		lesson: "make every input of a create from the key and the spec, never from the time, the OperationID, AdoptOnly or today's offers"},
	{rule: "B3", name: "late-create-then-adopt", needLive: true, needAdvance: true, run: checkLateCreateThenAdopt,
		lesson: "while an earlier create can still land, answer RetryAfter(Ambiguous(err), settle time), counted from LastCreateAt"},
	{rule: "B3", name: "late-create-then-destroy", needLive: true, needAdvance: true, run: checkLateCreateThenDestroy,
		lesson: "destroy what is there, but answer nil only when the settle time since LastCreateAt is over; until then Ambiguous with RetryAfter"},
	{rule: "B4", name: "adopt-after-create", run: checkAdoptAfterCreate,
		lesson: "an AdoptOnly create returns the machine that is there; AdoptOnly forbids buying, not finding"},
	{rule: "B4", name: "adopt-of-nothing", run: checkAdoptOfNothing,
		lesson: "an AdoptOnly create buys nothing: where no create was sent there is nothing to adopt, so answer ErrNothingToAdopt, or Ambiguous if in doubt"},
	{rule: "B4", name: "adopt-after-destroy", needLive: true, run: checkAdoptAfterDestroy,
		lesson: "an AdoptOnly create buys nothing, also not for a key whose machine is gone"},
	{rule: "B5", name: "destroy-twice", run: checkDestroyTwice,
		lesson: "take \"not found\" of a destroy for success: the answer to the first may have been lost"},
	{rule: "B5", name: "cancel-absent", run: checkCancelAbsent,
		lesson: "take an unknown session and a machine that is gone for a session that has ended, and return nil"},
	{rule: "B6", name: "destroy-means-gone", needLive: true, run: checkDestroyMeansGone},
	{rule: "B6", name: "destroy-ends-session", run: checkDestroyEndsSession,
		lesson: "end the sessions of the attempt before DestroyLease returns nil"},
	{rule: "B7", name: "cut-create", run: checkCutCreate,
		lesson: "when ctx is done and the request may be out, answer Ambiguous or ctx's own error: the driver asks again, and with AdoptOnly if it no longer wants the machine"},
	{rule: "B7", name: "cut-others", run: checkCutOthers},
	{rule: "B8", name: "neighbours", run: checkNeighbours,
		lesson: "match the Token exactly: never by prefix, by slot without attempt, or by address"},
	{rule: "B8", name: "adopt-is-exact", run: checkAdoptIsExact,
		lesson: "match the Token exactly: what another attempt of the slot has is not there to be adopted"},
	{rule: "B8", name: "at-once", run: checkAtOnce,
		lesson: "calls of different attempts run at the same time; share nothing between them but the provider's client"},
	{rule: "B9", name: "no-secrets", run: checkNoSecrets},
	{rule: "B10", name: "join-before-close", run: checkJoinBeforeClose,
		lesson: "report the join first and close after it: the close of a session without a join ends the attempt"},
	{rule: "B11", name: "create-after-destroy", needLive: true, run: checkCreateAfterDestroy,
		lesson: "LeaseLost without a lease, and Definite, promise that nothing billable is left; name what is left with LeaseLostWith"},
}

func checkWalk(k *kit) {
	a := k.attempt("", 0, 1)
	if a.boot() {
		a.drop()
	}
}

func checkCreateTwice(k *kit) {
	if a := k.attempt("", 0, 1); a.rent() {
		a.foundAgain(false)
	}
}

// foundAgain asks once more for a machine that is there and reports an answer
// that is not that machine.
func (a *attempt) foundAgain(adoptOnly bool) {
	k, first, what := a.k, a.lease, "CreateLease"
	if adoptOnly {
		what = "an AdoptOnly CreateLease"
	}
	o, ok := k.repeat(func() outcome { return a.create(atDeadline, adoptOnly) }, settled)
	switch {
	case !o.ok:
	case !ok || !succeeded(o):
		k.fail("%s of a machine that is there answered %v", what, o)
	case o.Lease != first:
		k.fail("%s of a machine that is there answered another lease", what)
		k.repeat(func() outcome { return a.destroy(atDeadline) }, succeeded) // the one too many
	default:
		if n, ok := a.live(); ok && n != 1 {
			k.fail("%s live after %s of a machine that is there", machines(n), what)
		}
	}
	a.lease, a.unresolved = first, false
}

func machines(n int) string {
	if n == 1 {
		return "1 machine"
	}
	return fmt.Sprintf("%d machines", n)
}

func checkStartTwice(k *kit) {
	a := k.attempt("", 0, 1)
	if !a.boot() {
		return
	}
	first := a.session
	o, ok := k.repeat(func() outcome { return a.start(atDeadline) }, settled)
	switch {
	case !o.ok:
	case !ok || !succeeded(o):
		k.fail("StartBootstrap answered a session first and, asked again, %v", o)
	case o.Session != first:
		k.fail("StartBootstrap answered one session first and another one when asked again")
	}
}

func checkRetryLater(k *kit) {
	if a := k.attempt("", 0, 1); a.rent() {
		k.settle() // the hour, and with it whatever depends on it, is another
		a.foundAgain(false)
	}
}

func checkLateCreateThenAdopt(k *kit) {
	for i, cut := range cuts {
		a := k.attempt("", i, 1)
		o := a.create(cut, false)
		if o.ok && a.lease == "" && a.unresolved {
			o, _ = a.resolve()
		}
		if !o.ok || a.lease != "" && !a.drop() {
			continue
		}
		k.settle()
		if n, ok := a.live(); ok && n > 0 && !a.unresolved {
			k.fail("%s live some time after a create was cut off and looked for: the final answer was %v", machines(n), o)
		}
	}
}

func checkLateCreateThenDestroy(k *kit) {
	for i, cut := range cuts {
		a := k.attempt("", i, 1)
		if o := a.create(cut, false); !o.ok || !a.rent() || !a.drop() {
			continue
		}
		k.settle()
		if n, ok := a.live(); ok && n > 0 {
			k.fail("%s live some time after a create was cut off, repeated, and its machine destroyed", machines(n))
		}
	}
}

func checkAdoptAfterCreate(k *kit) {
	if a := k.attempt("", 0, 1); a.rent() {
		a.foundAgain(true)
	}
}

func checkAdoptOfNothing(k *kit) {
	a := k.attempt("", 0, 1)
	o := a.create(atDeadline, true)
	switch {
	case !o.ok:
	case succeeded(o):
		k.fail("an AdoptOnly CreateLease of a fresh key answered a lease")
	case o.is(provisioning.ClassAmbiguous, provisioning.ClassNotStarted) || errors.Is(o.err, provisioning.ErrNothingToAdopt):
		if n, ok := a.live(); ok && n > 0 {
			k.fail("%s live after an AdoptOnly CreateLease of a fresh key", machines(n))
		}
	default:
		k.fail("an AdoptOnly CreateLease of a fresh key answered %v", o)
	}
}

func checkAdoptAfterDestroy(k *kit) {
	a := k.attempt("", 0, 1)
	if !a.rent() || !a.destroyed() {
		return
	}
	a.lease = ""
	if o, _ := a.resolve(); o.ok {
		if n, ok := a.live(); ok && n > 0 {
			k.fail("%s live after an AdoptOnly CreateLease of a key whose machine was destroyed", machines(n))
		}
	}
}

func checkDestroyTwice(k *kit) {
	a := k.attempt("", 0, 1)
	if !a.rent() || !a.destroyed() {
		return
	}
	o, ok := k.repeat(func() outcome { return a.destroy(atDeadline) }, succeeded)
	if o.ok && !ok {
		k.fail("DestroyLease of a machine that is gone answered %v", o)
	}
}

func checkCancelAbsent(k *kit) {
	a := k.attempt("", 0, 1)
	if !a.boot() {
		return
	}
	cancel := func(session provisioning.BootstrapSessionID, what string) {
		o, ok := k.repeat(func() outcome { return a.cancel(atDeadline, session) }, succeeded)
		if o.ok && !ok {
			k.fail("CancelBootstrap of %s answered %v", what, o)
		}
	}
	session := a.session
	cancel(session+"-unknown", "an unknown session")
	cancel(session, "a live session")
	cancel(session, "a session that has ended")
	if a.busy || !a.destroyed() {
		return
	}
	cancel(session, "a session whose machine is gone")
}

func checkDestroyMeansGone(k *kit) {
	if a := k.attempt("", 0, 1); a.rent() {
		a.destroyed() // looks every time; here for those who boot nothing
	}
	if a := k.attempt("", 1, 1); a.boot() {
		a.destroyed()
	}
}

func checkDestroyEndsSession(k *kit) {
	a := k.attempt("", 0, 1)
	if !a.boot() || !a.destroyed() {
		return
	}
	// What was on its way when the call returned may still arrive.
	time.Sleep(20 * time.Millisecond)
	_, before := a.seen.first(joined)
	k.settle()
	if _, after := a.seen.first(joined); before < 0 && after >= 0 {
		k.fail("the node joined after DestroyLease had returned nil")
	}
}

func checkCutCreate(k *kit) {
	for i, cut := range cuts {
		a := k.attempt("", i, 1)
		o := a.create(cut, false)
		if !o.ok || a.lease != "" || a.unresolved {
			continue
		}
		if n, ok := a.live(); ok && n > 0 {
			k.fail("a CreateLease whose ctx was cancelled answered %v with %s live", o, machines(n))
		}
	}
}

// checkCutOthers asks only that calls come back. A cut destroy may succeed,
// and then the others have nothing left to be called for, so it comes last.
func checkCutOthers(k *kit) {
	a := k.attempt("", 0, 1)
	if !a.boot() {
		return
	}
	for _, call := range []func(cut time.Duration) outcome{
		a.lookup,
		a.start,
		func(cut time.Duration) outcome { return a.converge(cut, "check") },
		func(cut time.Duration) outcome { return a.cancel(cut, a.session) },
		a.destroy,
	} {
		for _, cut := range cuts {
			o := call(cut)
			if a.busy {
				return
			}
			if o.Kind == provisioning.DestroyLease && succeeded(o) {
				a.gone(o)
				return
			}
		}
	}
}

func checkNeighbours(k *kit) {
	// Names that run into each other when joined or cut.
	attempts := []*attempt{
		k.attempt("", 1, 1),
		k.attempt("", 1, 11),
		k.attempt("", 10, 1),
		k.attempt("-1", 0, 1),
		k.attemptOf(k.id+"-"+provisioning.RunID(k.name), "1", 0, 1),
		k.attemptOf(k.id+"-2", provisioning.NodeGroupID(k.name), 1, 1),
	}
	for i, a := range attempts {
		if !a.rent() {
			return
		}
		for _, other := range attempts[:i] {
			if a.lease == other.lease {
				k.fail("%s got the lease of %s", a, other)
				return
			}
		}
	}
	if !attempts[0].drop() {
		return
	}
	for _, a := range attempts[1:] {
		n, counted := a.live()
		if counted && n != 1 {
			k.fail("%s of %s live after that of %s was destroyed", machines(n), a, attempts[0])
		} else if !counted {
			a.foundAgain(false)
		}
	}
}

func checkAdoptIsExact(k *kit) {
	first, second := k.attempt("", 0, 1), k.attempt("", 0, 2)
	if !first.rent() {
		return
	}
	if o := second.create(atDeadline, true); succeeded(o) && o.Lease == first.lease {
		k.fail("an AdoptOnly CreateLease of attempt 2 answered the lease of attempt 1")
		second.over = true
	}
}

func checkAtOnce(k *kit) {
	var attempts []*attempt
	var calls []*pendingCall
	for i := range 4 {
		attempts = append(attempts, k.attempt("", i, 1))
	}
	for _, a := range attempts {
		calls = append(calls, a.beginCreate(atDeadline, false))
	}
	for i, p := range calls {
		attempts[i].created(p.end(atDeadline), false)
	}
	seen := make(map[provisioning.ProviderLeaseID]bool)
	for _, a := range attempts {
		if a.busy || a.lease == "" && !a.rent() {
			return
		}
		if seen[a.lease] {
			k.fail("creates of different slots at the same time were answered with one lease")
			return
		}
		seen[a.lease] = true
	}
}

func checkNoSecrets(k *kit) {
	k.attempt("", 0, 1).boot() // names are judged as they come
}

func checkJoinBeforeClose(k *kit) {
	a := k.attempt("", 0, 1)
	if !a.boot() {
		return
	}
	either := func(o provisioning.Observation) bool { return joined(o) || closed(o) }
	k.await(k.subject.Patience, provisioning.DefaultMaxDelay, a.seen.changed, func() bool {
		_, i := a.seen.first(either)
		return i >= 0
	})
	o, i := a.seen.first(either)
	switch {
	case i < 0:
		k.notRun = "no join was reported within the patience of the kit; if joins reach the driver by another way, that is fine"
		return
	case closed(o):
		k.fail("the session was closed before a join was reported")
		return
	case o.Session != a.session:
		k.failAs(k.rule, "report under the session that StartBootstrap returns: the driver drops everything else",
			"the join was reported for another session than StartBootstrap answered")
		return
	}
	for _, again := range []string{"", " when it was repeated"} {
		o, ok := k.repeat(func() outcome { return a.converge(atDeadline, o.Swactor) }, succeeded)
		if o.ok && !ok {
			k.failAs(Contract, "accept the news of a join any number of times, also after the session has ended", "BootstrapConvergenceObserved failed%s: %v", again, o)
		}
		if !ok {
			return
		}
	}
}

func checkCreateAfterDestroy(k *kit) {
	a := k.attempt("", 0, 1)
	if !a.rent() || !a.destroyed() {
		return
	}
	a.lease = ""
	o, _ := k.repeat(func() outcome { return a.create(atDeadline, false) }, settled)
	if n, ok := a.live(); ok && n > 0 && a.lease == "" && !a.unresolved {
		k.fail("CreateLease of a key whose machine was destroyed answered %v with %s live", o, machines(n))
	}
	// A lease that was answered can be given back, which is seen to now.
}
