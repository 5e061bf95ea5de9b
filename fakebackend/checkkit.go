package fakebackend

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/swactor/provisioning"
)

const (
	// grace is how long, in real time, a call may go on after its ctx was
	// cancelled (B7).
	grace = 5 * time.Second
	// firstWait is the wait after a failed call; it doubles up to
	// provisioning.DefaultMaxDelay. The driver begins at 1 s, but nobody
	// watches a driver wait.
	firstWait = 10 * time.Millisecond

	patience        = 2 * time.Minute
	patienceAdvance = 2 * time.Hour
)

// kit runs one case on one subject, in the driver's place. Its clock is its
// own, as the driver's is.
type kit struct {
	checkCase
	subject Subject
	id      provisioning.RunID
	secret  string
	ctx     context.Context // of all calls
	began   time.Time       // real
	ahead   time.Duration

	attempts []*attempt
	failures []Failure
	notRun   string
}

func newKit(ctx context.Context, c checkCase, run provisioning.RunID) *kit {
	return &kit{ctx: ctx, checkCase: c, id: run, secret: rand.Text(), began: time.Now()}
}

func (k *kit) use(subject Subject) {
	if subject.Patience <= 0 {
		subject.Patience = patience
		if subject.Advance != nil {
			subject.Patience = patienceAdvance
		}
	}
	k.subject = subject
}

// judgeGroup panics if no slot can be made of Subject.Group.
func (k *kit) judgeGroup() {
	k.attempt("", 0, 1)
	k.attempts = nil
}

func (k *kit) result() CaseResult {
	result := CaseResult{Rule: k.rule, Case: k.name, Why: k.why, NotRun: k.notRun, Failures: k.failures}
	for _, a := range k.attempts {
		if !a.over {
			result.Left = append(result.Left, a.key)
		}
	}
	return result
}

func (k *kit) fail(format string, args ...any) { k.failAs(k.rule, k.lesson, format, args...) }

func (k *kit) failAs(rule, lesson, format string, args ...any) {
	k.failures = append(k.failures, Failure{Rule: rule, Case: k.name, Problem: fmt.Sprintf(format, args...), Lesson: lesson})
}

// fenced turns a panic of the subject's own functions into a failure, and is
// false then. Calls of the backend have a fence of their own.
func (k *kit) fenced(do func()) (ok bool) {
	defer func() {
		if p := recover(); p != nil {
			k.failAs(Contract, "the functions of a Subject return, and its Group is a valid one", "the subject: panic: %v", p)
		}
	}()
	do()
	return true
}

// giveBack takes down what the case has left, as far as it can.
func (k *kit) giveBack() {
	told := len(k.failures)
	for _, a := range k.attempts {
		k.fenced(func() { a.drop() })
	}
	if told > 0 {
		k.failures = k.failures[:told] // consequences; what is left is listed
	}
}

// Time.

func (k *kit) now() time.Time {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	if k.subject.Advance == nil {
		return start.Add(time.Since(k.began))
	}
	return start.Add(k.ahead)
}

// pass lets at most step go by, less in real time if something changes.
func (k *kit) pass(changed <-chan struct{}, step time.Duration) {
	if k.subject.Advance == nil {
		select {
		case <-changed:
		case <-time.After(step):
		}
		return
	}
	// Goroutines of the backend get a moment before its clock moves on.
	select {
	case <-changed:
		return
	case <-time.After(time.Millisecond):
	}
	k.ahead += step
	k.subject.Advance(step)
}

// await lets time go by until done holds, for at most d and in steps of at
// most step. It looks again whenever changed holds a value.
func (k *kit) await(d, step time.Duration, changed <-chan struct{}, done func() bool) bool {
	for end := k.now().Add(d); !done(); {
		left := end.Sub(k.now())
		if left <= 0 {
			return false
		}
		k.pass(changed, min(step, left))
	}
	return true
}

// sleep lets d go by.
func (k *kit) sleep(d time.Duration) {
	k.await(d, time.Minute, nil, func() bool { return false })
}

// settle waits until whatever was under way must have come to pass: no backend
// may need longer than the driver is ready to wait. In real time nobody waits
// that long, and a second shows what it shows.
func (k *kit) settle() {
	if k.subject.Advance == nil {
		k.sleep(time.Second)
	} else {
		k.sleep(provisioning.DefaultMaxRetryAfter)
	}
}

// attempt is one attempt and what the driver would remember of it.
type attempt struct {
	k    *kit
	key  provisioning.ExternalKey
	spec provisioning.LogicalNodeSpec

	sequence     uint64
	creates      uint32
	lastCreateAt time.Time
	unresolved   bool // a create has no answer yet
	reached      bool // a create may have reached the provider, going by the answers
	lease        provisioning.ProviderLeaseID
	endpoint     *provisioning.SSHEndpoint
	session      provisioning.BootstrapSessionID
	seen         *eventLog

	over bool // nothing of it exists
	busy bool // a call has not come back
}

// attempt returns an attempt of slot index of the group called "{case}{suffix}".
func (k *kit) attempt(suffix string, index int, id provisioning.NodeAttemptID) *attempt {
	return k.attemptOf(k.id, provisioning.NodeGroupID(k.name+suffix), index, id)
}

func (k *kit) attemptOf(run provisioning.RunID, group provisioning.NodeGroupID, index int, id provisioning.NodeAttemptID) *attempt {
	g := k.subject.Group
	g.RunID, g.GroupID, g.Count = run, group, index+1
	g.Boot.Env = maps.Clone(g.Boot.Env)
	if g.Boot.Env == nil {
		g.Boot.Env = make(map[string]string)
	}
	g.Boot.Env["PROVISIONING_CHECK_SECRET"] = k.secret
	a := &attempt{k: k, over: true, seen: &eventLog{changed: make(chan struct{}, 1)}}
	desired, err := provisioning.Expand(provisioning.ClusterShape{RunID: run, Generation: 1, Groups: []provisioning.NodeGroupSpec{g}})
	if err != nil {
		panic(fmt.Sprintf("Subject.Group: %v", err))
	}
	for spec := range desired.All() {
		a.spec = spec // the last is ours
	}
	a.key = provisioning.ExternalKey{Run: run, Node: a.spec.Node, Attempt: id}
	k.attempts = append(k.attempts, a)
	return a
}

// String names the attempt without the run's random part.
func (a *attempt) String() string {
	name := fmt.Sprintf("attempt %d of %s", a.key.Attempt, a.key.Node)
	if a.key.Run != a.k.id {
		return name + " of another run"
	}
	return name
}

// live returns what Live says. It is false if Live is missing or failed.
func (a *attempt) live() (int, bool) {
	if a.k.subject.Live == nil {
		return 0, false
	}
	n, err := a.k.subject.Live(a.key)
	if err != nil {
		a.k.failAs(Contract, "the kit cannot judge what it cannot count", "Subject.Live failed: %v", err)
	}
	return n, err == nil
}

// Single calls. Each goes out like one of the executor: on a goroutine of its
// own, never two at a time for one attempt, under a new OperationID.

// outcome is how a call ended. Where ok is false it has not, or panicked: that
// is reported, and an attempt that is still busy is of no more use.
type outcome struct {
	provisioning.Completion
	err error
	ok  bool
}

func (o outcome) is(classes ...provisioning.FailureClass) bool {
	for _, c := range classes {
		if o.ok && o.Class == c {
			return true
		}
	}
	return false
}

func (o outcome) String() string {
	if o.err == nil {
		return "success"
	}
	if o.RetryAfter > 0 {
		return fmt.Sprintf("%v error %q, to be retried after %v", o.Class, o.err, o.RetryAfter)
	}
	return fmt.Sprintf("%v error %q", o.Class, o.err)
}

// When ctx is cancelled, counted from the start of the call in real time.
const (
	atDeadline time.Duration = -2 // the driver's, in the time of Advance
	atOnce     time.Duration = -1 // before the call begins
)

var cuts = []time.Duration{atOnce, 0, time.Millisecond, 20 * time.Millisecond}

type pendingCall struct {
	attempt  *attempt
	cancel   context.CancelFunc
	returned chan struct{}
	out      outcome // once returned is closed
	broke    string  // panic or Goexit, likewise
}

func (a *attempt) begin(kind provisioning.OperationKind, cut time.Duration, do func(context.Context, *provisioning.Completion) error) *pendingCall {
	a.sequence++
	a.busy = true
	p := &pendingCall{attempt: a, returned: make(chan struct{}), broke: "left its goroutine (runtime.Goexit)"}
	p.out.Operation, p.out.Kind = a.operation(), kind
	ctx, cancel := context.WithCancel(a.k.ctx)
	p.cancel = cancel
	if cut == atOnce {
		cancel()
	}
	go func() {
		defer close(p.returned)
		defer func() {
			if r := recover(); r != nil {
				p.broke = fmt.Sprintf("panicked: %v", r)
			}
		}()
		err := do(ctx, &p.out.Completion)
		if err != nil {
			p.out.Completion = provisioning.FailedCompletion(p.out.Operation, kind, err)
		}
		p.out.err, p.broke = err, ""
	}()
	return p
}

func (p *pendingCall) end(cut time.Duration) outcome {
	defer p.cancel()
	k := p.attempt.k
	switch {
	case cut == atDeadline:
		back := func() bool {
			select {
			case <-p.returned:
				return true
			default:
				return false
			}
		}
		k.await(min(provisioning.DefaultOperationTimeout, k.subject.Patience), time.Second, p.returned, back)
	case cut >= 0:
		select {
		case <-p.returned:
		case <-time.After(cut):
		}
	}
	p.cancel()
	select {
	case <-p.returned:
	case <-time.After(grace):
		k.failAs("B7", "return soon after ctx is done, with its error: pass ctx on to whatever the call waits for",
			"%v still ran %v after its ctx was cancelled", p.out.Kind, grace)
		return outcome{}
	}
	p.attempt.busy = false
	if p.broke != "" {
		k.failAs(Contract, "return an error: the executor can only call the outcome Ambiguous", "%v %s", p.out.Kind, p.broke)
		return outcome{}
	}
	p.out.ok = true
	return p.out
}

func (a *attempt) call(kind provisioning.OperationKind, cut time.Duration, do func(context.Context, *provisioning.Completion) error) outcome {
	return a.begin(kind, cut, do).end(cut)
}

func (a *attempt) operation() provisioning.OperationID {
	return provisioning.OperationID{Attempt: a.key.Attempt, Sequence: a.sequence}
}

func (a *attempt) create(cut time.Duration, adoptOnly bool) outcome {
	o := a.created(a.beginCreate(cut, adoptOnly).end(cut), adoptOnly)
	if o.is(provisioning.ClassNotStarted) && !adoptOnly && !a.reached && a.k.subject.Live == nil {
		a.create(atDeadline, true) // nobody counts, so ask
	}
	return o
}

// soldAfterAll reports a machine of an attempt none of whose creates has reached
// the provider, going by their answers. The driver believes them: it remembers
// nothing to ask about, and if it no longer wants the node nobody looks for the
// machine again.
func (a *attempt) soldAfterAll(seen string) {
	a.reached = true // told once
	a.k.failAs(Contract, "NotStarted is for what certainly never left: once a request may be out, leave its error without a class",
		"every create of a key was answered NotStarted, and %s", seen)
}

func (a *attempt) beginCreate(cut time.Duration, adoptOnly bool) *pendingCall {
	req := provisioning.CreateLeaseRequest{Key: a.key, Spec: a.spec, AdoptOnly: adoptOnly,
		CreatesSent: a.creates, LastCreateAt: a.lastCreateAt, Now: a.k.now()}
	a.over, a.unresolved = false, true
	if !adoptOnly {
		a.creates++
		a.lastCreateAt = req.Now
	}
	return a.begin(provisioning.CreateLease, cut, func(ctx context.Context, c *provisioning.Completion) error {
		req.Operation = c.Operation
		res, err := a.k.subject.Backend.CreateLease(ctx, req)
		c.Lease, c.Endpoint = res.Lease, res.Endpoint
		return err
	})
}

// created remembers the outcome of a create.
func (a *attempt) created(o outcome, adoptOnly bool) outcome {
	if !adoptOnly {
		a.lastCreateAt = a.k.now()
	}
	switch {
	case o.is(provisioning.ClassNotStarted) && !a.reached && !adoptOnly:
		if n, ok := a.live(); ok && n > 0 {
			a.soldAfterAll(machines(n) + " live")
		}
	case succeeded(o) && !a.reached && adoptOnly && a.creates > 0:
		a.soldAfterAll("an AdoptOnly one then found a machine")
	}
	a.reached = a.reached || !o.is(provisioning.ClassNotStarted)
	switch {
	case o.is(provisioning.ClassNone) && o.Lease == "":
		a.k.failAs(Contract, "a success names the lease; without one nobody can give the machine back", "CreateLease succeeded without a lease")
		o.ok = false
	case o.is(provisioning.ClassNone):
		a.judgeName("lease", string(o.Lease))
		a.lease, a.unresolved = o.Lease, false
		if o.Endpoint != nil {
			a.endpoint = o.Endpoint
			a.judgeEndpoint(o)
		}
	case o.is(provisioning.ClassDefinite), o.is(provisioning.ClassLeaseLost):
		a.unresolved = false
		if o.Lease != "" {
			a.lease = o.Lease // B11
		}
	}
	return o
}

func (a *attempt) lookup(cut time.Duration) outcome {
	req := provisioning.LookupEndpointRequest{Key: a.key, Spec: a.spec, Lease: a.lease}
	o := a.call(provisioning.LookupEndpoint, cut, func(ctx context.Context, c *provisioning.Completion) error {
		req.Operation = c.Operation
		res, err := a.k.subject.Backend.LookupEndpoint(ctx, req)
		c.Endpoint = res.Endpoint
		return err
	})
	if o.is(provisioning.ClassNone) && o.Endpoint != nil {
		a.endpoint = o.Endpoint
		a.judgeEndpoint(o)
	}
	return o
}

// judgeEndpoint reports an endpoint that leads nowhere.
func (a *attempt) judgeEndpoint(o outcome) {
	if o.Endpoint.Host == "" || o.Endpoint.Port == 0 {
		a.k.failAs(Contract, "an endpoint is a host and a port; while either is not known answer none, and the driver asks again",
			"%v answered the endpoint %q", o.Kind, o.Endpoint)
	}
}

func (a *attempt) start(cut time.Duration) outcome {
	req := provisioning.StartBootstrapRequest{Key: a.key, Spec: a.spec, Lease: a.lease, Endpoint: *a.endpoint,
		Sink: provisioning.NewBootstrapSink(a.key.Node, a.key.Attempt, a.seen.record)}
	o := a.call(provisioning.StartBootstrap, cut, func(ctx context.Context, c *provisioning.Completion) error {
		req.Operation = c.Operation
		res, err := a.k.subject.Backend.StartBootstrap(ctx, req)
		c.Session = res.Session
		return err
	})
	switch {
	case o.is(provisioning.ClassNone) && o.Session == "":
		a.k.failAs(Contract, "a success names the session that the stream reports under", "StartBootstrap succeeded without a session")
		o.ok = false
	case o.is(provisioning.ClassNone):
		a.judgeName("session", string(o.Session))
		a.session = o.Session
	}
	return o
}

func (a *attempt) converge(cut time.Duration, swactor provisioning.SwactorID) outcome {
	req := provisioning.BootstrapConvergenceObservedRequest{Key: a.key, Spec: a.spec, Lease: a.lease, Endpoint: *a.endpoint,
		Session: a.session, Swactor: swactor}
	return a.call(provisioning.BootstrapConvergenceObserved, cut, func(ctx context.Context, c *provisioning.Completion) error {
		req.Operation = c.Operation
		return a.k.subject.Backend.BootstrapConvergenceObserved(ctx, req)
	})
}

func (a *attempt) cancel(cut time.Duration, session provisioning.BootstrapSessionID) outcome {
	req := provisioning.CancelBootstrapRequest{Key: a.key, Spec: a.spec, Lease: a.lease, Endpoint: a.endpoint, Session: session}
	return a.call(provisioning.CancelBootstrap, cut, func(ctx context.Context, c *provisioning.Completion) error {
		req.Operation = c.Operation
		return a.k.subject.Backend.CancelBootstrap(ctx, req)
	})
}

func (a *attempt) destroy(cut time.Duration) outcome {
	req := provisioning.DestroyLeaseRequest{Key: a.key, Spec: a.spec, Lease: a.lease,
		CreatesSent: a.creates, LastCreateAt: a.lastCreateAt, Now: a.k.now()}
	return a.call(provisioning.DestroyLease, cut, func(ctx context.Context, c *provisioning.Completion) error {
		req.Operation = c.Operation
		return a.k.subject.Backend.DestroyLease(ctx, req)
	})
}

// judgeName looks for what must not be in a name (B9). Short values prove
// nothing: they are found everywhere.
func (a *attempt) judgeName(what, name string) {
	const shortest = 8
	lesson := "make names of the key alone (Token, Name): lists, logs and bills show them"
	name = strings.ToLower(name)
	for _, variable := range slices.Sorted(maps.Keys(a.spec.Boot.Env)) {
		value := a.spec.Boot.Env[variable]
		if len(value) >= shortest && strings.Contains(name, strings.ToLower(value)) {
			a.k.failAs("B9", lesson, "the name of a %s holds the value of the boot variable %s", what, variable)
		}
	}
	if ref := a.spec.SwarmJoin.JoinTokenRef; len(ref) >= shortest && strings.Contains(name, strings.ToLower(ref)) {
		a.k.failAs("B9", lesson, "the name of a %s holds the reference of the join token", what)
	}
}

// Calls with the patience of the driver.

// repeat makes a call until final accepts its outcome. It is false when
// patience is over or a call did not end properly, which is reported; the
// outcome is then the last one.
func (k *kit) repeat(call func() outcome, final func(outcome) bool) (outcome, bool) {
	end := k.now().Add(k.subject.Patience)
	for wait := firstWait; ; wait = min(2*wait, provisioning.DefaultMaxDelay) {
		o := call()
		if !o.ok || final(o) {
			return o, o.ok
		}
		pause := max(wait, min(o.RetryAfter, provisioning.DefaultMaxRetryAfter))
		if k.now().Add(pause).After(end) {
			return o, false
		}
		k.sleep(pause)
	}
}

func succeeded(o outcome) bool { return o.is(provisioning.ClassNone) }

// settled: the backend has made up its mind about a create.
func settled(o outcome) bool {
	return o.is(provisioning.ClassNone, provisioning.ClassDefinite, provisioning.ClassLeaseLost)
}

// rent creates the machine. What stands in the way is reported.
func (a *attempt) rent() bool {
	o, ok := a.k.repeat(
		func() outcome { return a.create(atDeadline, false) },
		func(o outcome) bool { return o.is(provisioning.ClassNone, provisioning.ClassLeaseLost) })
	if o.ok && !succeeded(o) {
		a.k.failAs(Contract, "the kit needs a machine to look at: see that the subject can rent one, and that Patience is long enough",
			"CreateLease of a fresh key came to no success, at last: %v", o)
	}
	return ok && succeeded(o)
}

// boot rents the machine and starts its bootstrap.
func (a *attempt) boot() bool {
	if !a.rent() {
		return false
	}
	if a.endpoint == nil {
		o, _ := a.k.repeat(
			func() outcome { return a.lookup(atDeadline) },
			func(o outcome) bool { return a.endpoint != nil || o.is(provisioning.ClassLeaseLost) })
		if a.endpoint == nil {
			if o.ok {
				a.k.failAs(Contract, "the kit needs a machine that answers: see that the subject can boot one, and that Patience is long enough",
					"LookupEndpoint found no endpoint, at last: %v", o)
			}
			return false
		}
	}
	o, ok := a.k.repeat(
		func() outcome { return a.start(atDeadline) },
		func(o outcome) bool {
			return o.is(provisioning.ClassNone, provisioning.ClassDefinite, provisioning.ClassLeaseLost)
		})
	if o.ok && !succeeded(o) {
		a.k.failAs(Contract, "the kit needs a bootstrap: see that the subject can start one, and that Patience is long enough",
			"StartBootstrap came to no success, at last: %v", o)
	}
	return ok && succeeded(o)
}

// resolve finds out what became of a create, as the driver does for a node it
// deletes.
func (a *attempt) resolve() (outcome, bool) {
	o, ok := a.k.repeat(func() outcome { return a.create(atDeadline, true) }, settled)
	if o.ok && !ok {
		a.k.failAs("B3", "once the settle time is over, know: name the machine, or answer ErrNothingToAdopt",
			"an AdoptOnly CreateLease came to no final answer, at last: %v", o)
	}
	return o, ok
}

// destroyed destroys until the driver would take the machine for gone, and
// looks whether it is (B6).
func (a *attempt) destroyed() bool {
	o, ok := a.k.repeat(
		func() outcome { return a.destroy(atDeadline) },
		func(o outcome) bool { return o.is(provisioning.ClassNone, provisioning.ClassLeaseLost) })
	if !ok {
		if o.ok {
			a.k.failAs("B6", "return nil once the machine is gone, and see that it goes: until nil the driver repeats, and the bill runs",
				"DestroyLease of a machine came to no success, at last: %v", o)
		}
		return false
	}
	return a.gone(o)
}

// gone holds a destroy that was answered with o to its word (B6).
func (a *attempt) gone(o outcome) bool {
	if n, counted := a.live(); counted && n > 0 {
		a.k.failAs("B6", "return nil only once the machine is gone or irrevocably going; until then wait or return an error, and the driver asks again",
			"DestroyLease ended with %v while %s live", o, machines(n))
		return false
	}
	a.over = true
	return true
}

// drop takes the attempt down as the driver does: resolve, cancel, destroy.
func (a *attempt) drop() bool {
	if a.over || a.busy {
		return a.over
	}
	if a.unresolved {
		if _, ok := a.resolve(); !ok {
			return false
		}
	}
	if a.session != "" {
		if o := a.cancel(atDeadline, a.session); !o.ok && a.busy { // a polite step: its failure stops nothing
			return false
		}
		a.session = ""
	}
	if a.lease != "" {
		return a.destroyed()
	}
	a.over = true
	return true
}

// eventLog keeps what a bootstrap reports.
type eventLog struct {
	mu      sync.Mutex
	events  []provisioning.Observation
	changed chan struct{}
}

func (r *eventLog) record(o provisioning.Observation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, o)
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// all returns the events so far; the caller only reads them.
func (r *eventLog) all() []provisioning.Observation {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.events[:len(r.events):len(r.events)]
}

// first returns the place of the first event that matches, or -1.
func (r *eventLog) first(matches func(provisioning.Observation) bool) (provisioning.Observation, int) {
	for i, o := range r.all() {
		if matches(o) {
			return o, i
		}
	}
	return provisioning.Observation{}, -1
}

func joined(o provisioning.Observation) bool { return o.Kind == provisioning.SwactorJoined }

func closed(o provisioning.Observation) bool {
	return o.Kind == provisioning.BootstrapClosed ||
		o.Kind == provisioning.BootstrapProgress && o.Stage == provisioning.BootstrapStageClosed
}
