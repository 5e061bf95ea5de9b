package fakebackend

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/swactor/provisioning"
)

// checkCases are the cases in the order of their rules. A case tells one
// story; attempts that it leaves behind are taken down after it.
var checkCases = []checkCase{
	{rule: Contract, name: "walk", run: checkWalk,
		why: "a machine is rented, booted and given back; nothing else can be judged before that works"},
	{rule: Contract, name: "error-classes", run: checkErrorClasses,
		why:    "the class of an error is all that the driver goes by: after a wrong no it rents again or takes a node down, and the machine that is there is billed on",
		lesson: "answer ctx's own error as it is: Definite from a create says that nothing exists for the key, and LeaseLost that the machine is gone, and a deadline proves neither"},
	{rule: "B1", name: "create-twice", run: checkCreateTwice,
		why:    "every create whose answer is lost is sent again, so a create that buys each time is billed each time",
		lesson: "look for the machine of this ExternalKey first, or send its Token as the provider's idempotency token, and return the lease that is there"},
	{rule: "B1", name: "cut-create-then-retry", needLive: true, run: checkCutCreateThenRetry,
		why:    "a create that outlives its deadline is cut off half-way, and the retry follows at once, while the provider still works on the first",
		lesson: "what was sent before ctx was done may have bought: the retry sends the same Token, or looks for the machine, before it buys"},
	{rule: "B1", name: "accepted-then-error", needLose: true, run: checkAcceptedThenError,
		why:    "a front end that loses its connection answers 500 for a request that was carried out",
		lesson: "an error that comes after the request went out proves nothing: return it without a class, and let the retry find what is there"},
	{rule: "B1", name: "start-twice", run: checkStartTwice,
		why:    "a start whose answer is lost is sent again, and two agents on one machine fight over its name",
		lesson: "look for the bootstrap of this ExternalKey first and return its session"},
	{rule: "B2", name: "retry-later", needAdvance: true, run: checkRetryLater,
		why:    "the retry may come an hour later, when the market offers something else",
		lesson: "make every input of a create from the key and the spec, never from the time, the OperationID, AdoptOnly or today's offers"},
	{rule: "B3", name: "late-create-then-adopt", needLive: true, needAdvance: true, run: checkLateCreateThenAdopt,
		why:    "a request that was cut off may be carried out after somebody has looked and found nothing",
		lesson: "while an earlier create can still land, answer RetryAfter(Ambiguous(err), settle time), counted from LastCreateAt"},
	{rule: "B3", name: "late-create-then-destroy", needLive: true, needAdvance: true, run: checkLateCreateThenDestroy,
		why:    "the machine of a request that was cut off may appear after the one of its retry was given back",
		lesson: "destroy what is there, but answer nil only when the settle time since LastCreateAt is over; until then Ambiguous with RetryAfter"},
	{rule: "B3", name: "list-lag", needLive: true, needAdvance: true, about: new(Label), run: checkListLag,
		why:    "a list shows a new machine late, by seconds on most days and by minutes on a bad one",
		lesson: "a list without the machine proves nothing before the settle time since LastCreateAt is over: until then neither buy nor give a final no"},
	{rule: "B4", name: "adopt-after-create", run: checkAdoptAfterCreate,
		why:    "before a node is deleted, an AdoptOnly create asks what an unanswered create has left; what it does not find nobody destroys",
		lesson: "an AdoptOnly create returns the machine that is there; AdoptOnly forbids buying, not finding"},
	{rule: "B4", name: "adopt-of-nothing", run: checkAdoptOfNothing,
		why:    "a node that is being deleted must not be bought a machine on the way",
		lesson: "an AdoptOnly create buys nothing: where no create was sent there is nothing to adopt, so answer ErrNothingToAdopt, or Ambiguous if in doubt"},
	{rule: "B4", name: "adopt-after-destroy", needLive: true, run: checkAdoptAfterDestroy,
		why:    "the question may be put again when the machine is gone",
		lesson: "an AdoptOnly create buys nothing, also not for a key whose machine is gone"},
	{rule: "B5", name: "destroy-twice", run: checkDestroyTwice,
		why:    "a destroy whose answer is lost is sent again, and a machine can go without us; an error for what is absent keeps the slot from ever being used again",
		lesson: "take \"not found\" of a destroy for success: the answer to the first may have been lost"},
	{rule: "B5", name: "cancel-absent", run: checkCancelAbsent,
		why:    "sessions end by themselves, and with their machines; an error for one that has ended holds the destroy up",
		lesson: "take an unknown session and a machine that is gone for a session that has ended, and return nil"},
	{rule: "B6", name: "destroy-means-gone", needLive: true, run: checkDestroyMeansGone,
		why: "after nil nobody looks for the machine again: one that was only asked to go, and stays, is billed for good"},
	{rule: "B6", name: "destroy-ends-session", run: checkDestroyEndsSession,
		why:    "an agent that still joins from a machine that was given back takes the place of its successor",
		lesson: "end the sessions of the attempt before DestroyLease returns nil"},
	{rule: "B7", name: "cut-create", run: checkCutCreate,
		why:    "a call that does not return at its deadline holds its attempt up for as long as it likes",
		lesson: "when ctx is done and the request may be out, answer Ambiguous or ctx's own error: the driver asks again, and with AdoptOnly if it no longer wants the machine"},
	{rule: "B7", name: "cut-others", run: checkCutOthers,
		why: "a call that does not return at its deadline holds its attempt up for as long as it likes"},
	{rule: "B8", name: "neighbours", run: checkNeighbours,
		why:    "w-1 and w-10, or two runs in one account, differ little; a machine that two nodes hold is destroyed under one of them",
		lesson: "match the Token exactly: never by prefix, by slot without attempt, or by address"},
	{rule: "B8", name: "adopt-is-exact", run: checkAdoptIsExact,
		why:    "the machine of an earlier attempt may still be there, and it is not what this attempt asked for",
		lesson: "match the Token exactly: what another attempt of the slot has is not there to be adopted"},
	{rule: "B8", name: "name-conflict", about: new(Name), run: checkNameConflict,
		why:    "names of machines are short and allow few characters; of two slots that share the shortened name one gets the other's machine",
		lesson: "make the name with ExternalKey.Name, which keeps its hash at every length, and take a conflict for your own machine only if that one bears your Token"},
	{rule: "B8", name: "two-attempts", run: checkTwoAttempts,
		why:    "while one attempt of a slot is cleaned up, what it leaves must not touch another one that works",
		lesson: "key sessions, tags and side resources on the whole ExternalKey, never on the slot"},
	{rule: "B8", name: "address-reuse", run: checkAddressReuse,
		why:    "the address of a machine that is gone is soon another's: a look-up from memory, or a start that just connects, ends on that one",
		lesson: "ask the provider for the machine of this lease before every answer that names or uses its address; when it is gone, answer LeaseLost"},
	{rule: "B8", name: "at-once", run: checkAtOnce,
		why:    "a cluster is rented in one go",
		lesson: "calls of different attempts run at the same time; share nothing between them but the provider's client"},
	{rule: "B9", name: "no-secrets", run: checkNoSecrets,
		why: "names are shown in lists, logs and bills, to people who may not know the secret"},
	{rule: "B10", name: "join-before-close", run: checkJoinBeforeClose,
		why:    "a session that closes without a join is a failed attempt, whose machine is replaced",
		lesson: "report the join first and close after it: the close of a session without a join ends the attempt"},
	{rule: "B11", name: "create-after-destroy", needLive: true, run: checkCreateAfterDestroy,
		why:    "a machine may be gone before the answer to its create is read, and the create is sent again",
		lesson: "LeaseLost without a lease, and Definite, promise that nothing billable is left; name what is left with LeaseLostWith"},
	{rule: "B11", name: "spent-token", needLive: true, about: new(Token), run: checkSpentToken,
		why:    "a provider answers a token whose machine was terminated with that very machine, for a day; the node waits for it until its time is up, again and again",
		lesson: "look at the state of the machine that a token gives: if it is gone the identity is spent, so answer LeaseLost"},
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

func checkCutCreateThenRetry(k *kit) {
	for i, cut := range cuts {
		a := k.attempt("", i, 1)
		o := a.create(cut, false)
		if !o.ok || !a.rent() {
			continue
		}
		if n, ok := a.live(); ok && n != 1 {
			k.fail("%s live after a create was cut off (%v) and sent again", machines(n), o)
		}
	}
}

// checkAcceptedThenError has answers lost by the provider, which the backend
// sees. Where it is the driver that loses them, other cases tell.
func checkAcceptedThenError(k *kit) {
	a := k.attempt("", 0, 1)
	k.subject.LoseAnswer(a.key, provisioning.CreateLease)
	o := a.create(atDeadline, false)
	if n, ok := a.live(); ok && n > 0 && a.lease == "" && o.is(provisioning.ClassDefinite, provisioning.ClassLeaseLost) {
		k.failAs(Contract, "Definite and LeaseLost from a create say that nothing is there; leave an error of the provider without a class",
			"a create that the provider carried out and answered with an error came to a %v, with %s live", o, machines(n))
	}
	if !o.ok || !a.rent() {
		return
	}
	if n, ok := a.live(); ok && n != 1 {
		k.fail("%s live after a create was carried out, answered with an error and sent again", machines(n))
	}
	k.subject.LoseAnswer(a.key, provisioning.DestroyLease)
	a.destroyed()
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

// checkListLag asks at growing distances from a create whose answer got lost on
// the way to the driver, as that of a call past its deadline does.
func checkListLag(k *kit) {
	// What goes wrong however long the list has had is not its lag.
	control := k.attempt("", 0, 1)
	if !control.rent() {
		return
	}
	k.settle()
	lease := control.lease
	if o := control.create(atDeadline, false); succeeded(o) && o.Lease != lease {
		return
	}
	if n, ok := control.live(); ok && n > 1 {
		return
	}
	index := 1
	for _, gap := range []time.Duration{0, 5 * time.Second, 30 * time.Second, 2 * time.Minute, 10 * time.Minute} {
		for _, adoptOnly := range []bool{true, false} {
			a := k.attempt("", index, 1)
			index++
			if !a.rent() {
				return
			}
			a.lease, a.endpoint, a.unresolved = "", nil, true
			k.sleep(gap)
			o := a.create(atDeadline, adoptOnly)
			if !o.ok {
				return
			}
			k.settle()
			if n, ok := a.live(); ok && n > 1 {
				k.fail("%s live after a create whose answer was lost and another one %v later", machines(n), gap)
				return
			}
			if no := o.is(provisioning.ClassDefinite, provisioning.ClassLeaseLost) && o.Lease == ""; no {
				if later, ok := a.resolve(); ok && succeeded(later) {
					k.fail("%v after a create whose answer was lost another one was answered %v, and later the machine was found", gap, o)
					return
				}
			}
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
	again := func(what string) bool {
		o, ok := k.repeat(func() outcome { return a.destroy(atDeadline) }, succeeded)
		if o.ok && !ok {
			k.fail("DestroyLease of %s answered %v", what, o)
		}
		return ok
	}
	if again("a machine that is gone") {
		k.settle() // providers show for a while what is gone, and then no more
		again("a machine that was gone for long")
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
	if a.busy {
		return
	}
	n, counted := a.live()
	if !counted {
		if o, _ := k.repeat(func() outcome { return a.create(atDeadline, true) }, settled); !o.ok {
			return
		} else if succeeded(o) {
			n = 1
		}
	}
	if n == 0 {
		k.failAs(Contract, "end the session and leave its machine alone: DestroyLease gives it back when its time has come",
			"the machine was gone after CancelBootstrap")
	}
	if !a.destroyed() {
		return
	}
	a.endpoint = nil
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
		if o.is(provisioning.ClassNotStarted) {
			a.resolve() // the driver would not: what this finds would be left
			continue
		}
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

// checkErrorClasses cuts calls off whose machine is there.
func checkErrorClasses(k *kit) {
	a := k.attempt("", 0, 1)
	if !a.boot() {
		return
	}
	for _, call := range []func(cut time.Duration) outcome{
		func(cut time.Duration) outcome { return a.create(cut, false) },
		func(cut time.Duration) outcome { return a.create(cut, true) },
		a.lookup,
		a.start,
		func(cut time.Duration) outcome { return a.converge(cut, "check") },
		func(cut time.Duration) outcome { return a.cancel(cut, a.session) },
	} {
		for _, cut := range cuts {
			o := call(cut)
			if a.busy {
				return
			}
			nothing := o.Kind == provisioning.CreateLease && o.is(provisioning.ClassDefinite) &&
				!errors.Is(o.err, provisioning.ErrNothingToAdopt) // which is B4's affair
			if nothing || o.is(provisioning.ClassLeaseLost) {
				k.fail("a %v that was cut off, of a machine that is there, answered %v", o.Kind, o)
				break // the next cut would tell the same
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
		k.attempt("", 20, 1), // the longer one first
		k.attempt("", 2, 11),
		k.attempt("", 2, 1),
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
	for _, victim := range []*attempt{attempts[0], attempts[6]} {
		if !victim.drop() {
			return
		}
		for _, a := range attempts {
			if a.over {
				continue
			}
			n, counted := a.live()
			if counted && n != 1 {
				k.fail("%s of %s live after that of %s was destroyed", machines(n), a, victim)
			} else if !counted {
				a.foundAgain(false)
			}
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

func checkNameConflict(k *kit) {
	long := "-" + strings.Repeat("long", 50)
	attempts := []*attempt{
		k.attempt(long+"-a", 0, 1),
		k.attempt(long+"-b", 0, 1),
		k.attempt(long+"-b", 1, 1),
		k.attempt(long+"-b", 0, 2),
		k.attempt("-Large", 0, 1),
		k.attempt("-large", 0, 1),
		k.attempt("_é", 0, 1),
		k.attempt(".è", 0, 1),
	}
	holder := make(map[provisioning.ProviderLeaseID]*attempt)
	for _, a := range attempts {
		if !a.rent() {
			return
		}
		if other := holder[a.lease]; other != nil {
			k.fail("%s got the lease of %s", a, other)
			return
		}
		holder[a.lease] = a
	}
	for _, a := range attempts {
		if n, ok := a.live(); ok && n != 1 {
			k.fail("%s of %s live when all were rented", machines(n), a)
		}
	}
}

// bootBoth boots two attempts of a slot, if apart the second one when the first
// is gone.
func (k *kit) bootBoth(apart bool) (first, second *attempt, ok bool) {
	first, second = k.attempt("", 0, 1), k.attempt("", 0, 2)
	if !first.boot() || apart && !first.destroyed() {
		return nil, nil, false
	}
	o, _ := k.repeat(func() outcome { return second.create(atDeadline, false) }, settled)
	if apart && o.is(provisioning.ClassLeaseLost) {
		k.fail("once attempt 1 of a slot was gone, CreateLease of attempt 2 answered %v", o)
		return nil, nil, false
	}
	if !o.ok || !second.boot() {
		return nil, nil, false
	}
	if first.lease == second.lease || first.session == second.session {
		k.fail("two attempts of a slot were given one lease or one session")
		second.over = true // it has nothing of its own
		return nil, nil, false
	}
	return first, second, true
}

// adopts reports whether a repeated start comes to the session that runs. If it
// does not, start-twice tells, and nothing can be seen by repeating it.
func (a *attempt) adopts() bool {
	session := a.session
	o, ok := a.k.repeat(func() outcome { return a.start(atDeadline) }, settled)
	return ok && succeeded(o) && o.Session == session
}

// untouched reports a machine, or a session that was adopted before, that went
// away for what was done to another attempt.
func (a *attempt) untouched(adopted bool, by string) {
	n, counted := a.live()
	_, over := a.seen.first(func(o provisioning.Observation) bool { return joined(o) || closed(o) })
	switch {
	case a.busy:
	case counted && n == 0:
		a.k.fail("the machine of %s is gone after %s", a, by)
	case adopted && over < 0 && !a.adopts() && !a.busy:
		a.k.fail("the bootstrap of %s did not go on after %s", a, by)
	}
}

func checkTwoAttempts(k *kit) {
	first, second, ok := k.bootBoth(false)
	if !ok {
		return
	}
	adopted := second.adopts()
	first.cancel(atDeadline, first.session)
	if first.busy || second.busy {
		return
	}
	second.untouched(adopted, "the session of attempt 1 was cancelled")
	if first.destroyed() {
		second.untouched(adopted, "the machine of attempt 1 was destroyed")
	}
}

func checkAddressReuse(k *kit) {
	first, second, ok := k.bootBoth(true)
	if !ok {
		return
	}
	adopted := second.adopts()
	found := func(o outcome) bool { return succeeded(o) && o.Endpoint != nil }
	o, ok := k.repeat(
		func() outcome { return first.lookup(atDeadline) },
		func(o outcome) bool {
			return found(o) || o.is(provisioning.ClassDefinite, provisioning.ClassLeaseLost)
		})
	switch {
	case !o.ok:
	case found(o):
		k.fail("LookupEndpoint of a machine that is gone answered an endpoint")
	case !ok:
		k.failAs(Contract, "no endpoint means not yet, and the driver asks again; of a machine that is gone answer LeaseLost",
			"LookupEndpoint of a machine that is gone never said so, at last: %v", o)
	}
	if first.busy {
		return
	}
	if o := first.start(atDeadline); succeeded(o) {
		k.fail("StartBootstrap on a machine that is gone answered a session")
	}
	if !first.busy {
		first.cancel(atDeadline, first.session)
	}
	if !first.busy {
		first.destroy(atDeadline)
	}
	second.untouched(adopted, "attempt 1, which was gone, was asked for again")
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
	case o.Swactor == "":
		k.failAs(Contract, "a join names the agent, or the driver cannot tell it from another one", "the join named no agent")
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

func checkSpentToken(k *kit) {
	a := k.attempt("", 0, 1)
	if !a.rent() || !a.destroyed() {
		return
	}
	a.lease = ""
	o, _ := k.repeat(func() outcome { return a.create(atDeadline, false) }, settled)
	if n, ok := a.live(); ok && n == 0 && succeeded(o) {
		k.fail("CreateLease of a key whose machine was destroyed answered a lease, with no machine live")
	}
}
