package fakebackend

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/swactor/provisioning"
)

// Subject is a backend to check, and what the kit needs to look behind it.
// Everything but Backend is optional.
type Subject struct {
	Backend provisioning.EffectBackend
	// Group says what to rent: image, boot commands, labels. The kit fills
	// in its own run, group names and counts, and a secret to look for (B9).
	Group provisioning.NodeGroupSpec
	// Live returns how many machines exist for a key: what the provider
	// knows and would bill, however late its lists show it. A machine that
	// is irrevocably going does not count.
	Live func(provisioning.ExternalKey) (int, error)
	// Advance moves the clock of the subject on; it may be called while
	// calls of the backend run. Nil: the subject lives in real time.
	Advance func(time.Duration)
	// Classes say how the provider tells a repeated create from a new one,
	// each way that the backend makes use of. Cases about another class are
	// not run: each rents machines, for a fault that this provider cannot
	// bring about. Empty: all are run.
	Classes []Class
	// LoseAnswer tells the provider to carry out the next request of that
	// kind, CreateLease or DestroyLease, for the key and then to answer with
	// an error, as one does whose front end loses its connection.
	LoseAnswer func(provisioning.ExternalKey, provisioning.OperationKind)
	// Patience is how long the kit waits for a call, repeated like the
	// driver would, to come to its end, or for a join: at least the settle
	// time of the backend (B3) and the longest boot. It is in the time of
	// Advance, default 2 h; without Advance in real time, default 2 min.
	Patience time.Duration
	// Close is called once the kit is done with the subject.
	Close func()
}

// Contract is the [Failure.Rule] of what the comment of
// [provisioning.EffectBackend] asks for outside the numbered rules.
const Contract = "contract"

// Failure is one thing that a backend did wrong.
type Failure struct {
	// Rule is "B1" to "B11", or [Contract]; Case is the name of the case.
	Rule, Case string
	// Problem is what was seen, Lesson what a backend should do instead.
	Problem, Lesson string
}

// CaseResult is the outcome of one case. A case was passed if it was run and
// has no failures.
type CaseResult struct {
	// Rule is the rule that the case is about. Its failures may be of
	// another one, when a step on the way there went wrong.
	Rule, Case string
	// Why is what the case is there for: what happens in earnest, and what it
	// costs who gets it wrong.
	Why string
	// NotRun is why the case says nothing, empty if it was run.
	NotRun   string
	Failures []Failure
	// Left lists the keys whose machines the kit could not give back. They
	// may still be there.
	Left []provisioning.ExternalKey
}

// Report is what the kit found, case by case in a fixed order.
type Report struct{ Cases []CaseResult }

// Err returns a [*CheckError] with all failures, or nil if there are none.
func (r Report) Err() error {
	var failures []Failure
	for _, c := range r.Cases {
		failures = append(failures, c.Failures...)
	}
	if failures == nil {
		return nil
	}
	return &CheckError{Failures: failures}
}

// String tells a case in a line, a failed one as a lesson: why it matters, what
// was seen, and what a backend does instead. A line at the end counts them.
func (r Report) String() string {
	var b strings.Builder
	passed, failed, notRun := 0, 0, 0
	for _, c := range r.Cases {
		verdict := "ok"
		switch {
		case c.Failures != nil:
			verdict = "FAILED"
			failed++
		case c.NotRun != "":
			verdict = "not run"
			notRun++
		default:
			passed++
		}
		fmt.Fprintf(&b, "%-8s%-9s%s", verdict, c.Rule, c.Case)
		if c.NotRun != "" {
			fmt.Fprintf(&b, ": %s", c.NotRun)
		}
		b.WriteByte('\n')
		if c.Failures != nil && c.Why != "" {
			fmt.Fprintf(&b, "        why      %s\n", c.Why)
		}
		for _, f := range c.Failures {
			fmt.Fprintf(&b, "        seen     %s: %s\n        instead  %s\n", f.Rule, f.Problem, f.Lesson)
		}
		for _, key := range c.Left {
			fmt.Fprintf(&b, "        may be left behind: %s of run %s, attempt %d (%s)\n", key.Node, key.Run, key.Attempt, key.Token())
		}
	}
	fmt.Fprintf(&b, "%d passed, %d failed, %d not run\n", passed, failed, notRun)
	return b.String()
}

// CheckError lists what a backend does wrong.
type CheckError struct{ Failures []Failure }

// Error tells each failure with the rule it breaks, where it was seen and what
// to do instead. The same failure seen more than once is told once, with the
// name of each case that saw it.
func (e *CheckError) Error() string {
	type fault struct{ rule, problem, lesson string }
	var order []fault
	seenBy := make(map[fault][]string)
	for _, f := range e.Failures {
		key := fault{f.Rule, f.Problem, f.Lesson}
		if seenBy[key] == nil {
			order = append(order, key)
		}
		if !slices.Contains(seenBy[key], f.Case) {
			seenBy[key] = append(seenBy[key], f.Case)
		}
	}
	var b strings.Builder
	b.WriteString("fakebackend: the backend breaks its contract")
	for _, f := range order {
		fmt.Fprintf(&b, "\n  %s (%s): %s\n      %s", f.rule, strings.Join(seenBy[f], ", "), f.problem, f.lesson)
	}
	return b.String()
}

// Check holds a backend to the rules B1 to B11 of [provisioning.EffectBackend]
// and returns a [*CheckError] that names every breach it has seen, or nil. It
// calls newSubject once for every case and treats the backend as the driver
// would: an attempt has one call at a time, an Ambiguous answer is asked about
// again, and whatever was made is given back.
//
// What only a fault of the provider brings to light (several matches for one
// key, a cut connection) is seen only if the subject plays such faults. Cases
// that need a missing field of the Subject, or are about a class of provider
// that Classes leaves out, are not run; [CheckReport] says which. Nor is any case
// after one to which newSubject gave nothing that could be checked.
func Check(newSubject func() Subject) error { return CheckReport(newSubject).Err() }

// CheckReport does what [Check] does and tells the outcome of every case.
func CheckReport(newSubject func() Subject) Report {
	// Providers remember tokens, so a check in the same account must not
	// repeat the keys of an earlier one.
	id := strings.ToLower(rand.Text()[:10])
	if newSubject == nil {
		newSubject = func() Subject { panic("newSubject is nil") }
	}
	var report Report
	usable := true
	for _, c := range checkCases {
		result := CaseResult{Rule: c.rule, Case: c.name, Why: c.why, NotRun: "the subject is of no use, as told above"}
		if usable {
			result, usable = runCase(c, provisioning.RunID("check-"+id), newSubject)
		}
		report.Cases = append(report.Cases, result)
	}
	return report
}

// checkCase is one case of the kit. Its lesson is the default of its failures.
type checkCase struct {
	rule, name  string
	needLive    bool
	needAdvance bool
	needLose    bool
	about       *Class // of provider; nil: any
	why, lesson string
	run         func(k *kit)
}

// concerns reports whether the case is about a provider of those classes.
func (c checkCase) concerns(classes []Class) bool {
	return c.about == nil || len(classes) == 0 || slices.Contains(classes, *c.about)
}

// runCase is false if the subject is of no use, to any case.
func runCase(c checkCase, run provisioning.RunID, newSubject func() Subject) (result CaseResult, usable bool) {
	ctx, cancel := context.WithCancel(context.Background())
	k := newKit(ctx, c, run)
	defer func() {
		cancel() // a call that a panic of the subject cut off from the kit
		if k.subject.Close != nil {
			k.fenced(k.subject.Close)
		}
		result = k.result()
	}()
	if !k.fenced(func() { k.use(newSubject()) }) {
		return result, false
	}
	subject := &k.subject
	switch {
	case subject.Backend == nil:
		k.failAs(Contract, "set Subject.Backend", "the subject has no backend")
		return result, false
	case !k.fenced(k.judgeGroup):
		return result, false
	case !c.concerns(subject.Classes):
		k.notRun = fmt.Sprintf("is about providers of class %v", *c.about)
	case c.needLive && subject.Live == nil:
		k.notRun = "needs Subject.Live"
	case c.needAdvance && subject.Advance == nil:
		k.notRun = "needs Subject.Advance"
	case c.needLose && subject.LoseAnswer == nil:
		k.notRun = "needs Subject.LoseAnswer"
	default:
		k.fenced(func() { c.run(k) })
		k.giveBack()
	}
	return result, true
}
