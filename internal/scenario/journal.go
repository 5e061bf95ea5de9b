package scenario

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/swactor/provisioning"
)

// ErrUnsayable is what errors.Is finds in every [*UnsayableError].
var ErrUnsayable = errors.New("scenario: the language has no words for it")

// UnsayableError names what of a journal no scenario can say.
type UnsayableError struct {
	Line int // of the journal, from 1; 0: it is in no one line
	What string
}

// Error names the line.
func (e *UnsayableError) Error() string {
	if e.Line == 0 {
		return fmt.Sprintf("%v: %s", ErrUnsayable, e.What)
	}
	return fmt.Sprintf("%v: line %d: %s", ErrUnsayable, e.Line, e.What)
}

// Unwrap returns [ErrUnsayable].
func (e *UnsayableError) Unwrap() error { return ErrUnsayable }

// FromJournal tells what a journal holds as a scenario that passes: the same
// passes at the same times, with the same wishes, answers and reports, and what
// came of it. The journal ends with a whole pass and repeats without a
// difference, see [provisioning.Replay]. title is the first line of the story.
//
// Ids, texts, addresses and the numbers of lines are not told: the fake provider
// has its own, and nothing is decided by them. What cannot be told and matters
// is an [*UnsayableError].
func FromJournal(title string, journal []byte) (source string, err error) {
	t := &teller{
		calls:    make(map[provisioning.OperationID]*call),
		images:   make(map[provisioning.NodeGroupID][]imageWord),
		sessions: make(map[provisioning.NodeAttemptID][]startedSession),
		reported: make(map[provisioning.NodeAttemptID]provisioning.BootstrapSessionID),
		swactors: make(map[provisioning.NodeAttemptID]provisioning.SwactorID),
	}
	if err := t.read(journal); err != nil {
		return "", err
	}
	if len(t.batches) == 0 {
		return "", &UnsayableError{What: "there is no pass in it"}
	}
	report, err := t.replay(journal)
	if err != nil {
		return "", err
	}
	if err := t.tell(title, report); err != nil {
		return "", err
	}
	for _, newest := range []bool{false, true} {
		err := Run("the scenario", t.out.String(), Options{NewestFirst: newest})
		if failed, ok := errors.AsType[*Failure](err); ok {
			return "", &UnsayableError{What: fmt.Sprintf("told as a scenario it goes another way: at %q it should be %s and is %s",
				failed.Text, failed.Expected, failed.Found)}
		}
		if err != nil {
			return "", err
		}
	}
	return t.out.String(), nil
}

// teller turns a journal into a scenario.
type teller struct {
	config   string
	batches  []batch // each ends with its pass
	calls    map[provisioning.OperationID]*call
	ordered  []*call
	images   map[provisioning.NodeGroupID][]imageWord
	sessions map[provisioning.NodeAttemptID][]startedSession
	// What is reported first, of the attempts.
	reported map[provisioning.NodeAttemptID]provisioning.BootstrapSessionID
	swactors map[provisioning.NodeAttemptID]provisioning.SwactorID
	notes    []string
	told     int // bytes of the journal
	out      strings.Builder
}

// batch is a pass with what was delivered before it, and what it submits.
type batch struct {
	at        time.Time
	paused    bool
	items     []item
	submitted []*call
	current   map[provisioning.LogicalNodeID]provisioning.NodeAttemptID // attempts that begin in it
	changes   map[provisioning.LogicalNodeID]string                     // to be expected after it
}

// item is one line of a scenario, an answer to a call or a report of a stream.
type item struct {
	line     int
	text     string
	answered *call
	began    *call // that had waited for an earlier one
	report   *provisioning.Observation
}

// call is one submitted operation and what became of it.
type call struct {
	line      int
	slot      provisioning.LogicalNodeID
	operation provisioning.OperationID
	kind      provisioning.OperationKind
	adoptOnly bool
	queued    bool
	batch     int
	refused   bool

	answer   *provisioning.Completion
	answered int // the batch that delivers the answer
	expired  bool
	unbegun  bool // it expired while it waited for an earlier one
	effect   bool // it made a machine although nobody was told
	hangs    bool
	returned bool // as far as it is told
}

type imageWord struct {
	spec provisioning.LogicalNodeSpec
	word string
}

type startedSession struct {
	batch int
	id    provisioning.BootstrapSessionID
}

// The lines of a journal, as far as they are told.
type journalLine struct {
	Journal *struct {
		Config struct {
			Retry        provisioning.RetryPolicy
			GroupRetry   map[provisioning.NodeGroupID]provisioning.RetryPolicy
			MaxInFlight  int
			FirstAttempt provisioning.NodeAttemptID
		}
		Shape provisioning.ClusterShape
	}
	Update *struct {
		Shape   *provisioning.ClusterShape
		Drain   bool
		Refused string
	}
	Deliver *struct {
		provisioning.Observation
		Numbers *[4]uint8
	}
	Pass *struct {
		At       time.Time
		FoldOnly bool
		Paused   bool
	}
	Expire *struct {
		Operation provisioning.OperationID
		Answer    provisioning.Completion
		Numbers   *[4]uint8
		Broke     bool
	}
	Submit *struct {
		Operation  provisioning.OperationID
		Kind       provisioning.OperationKind
		Node       provisioning.LogicalNodeID
		AdoptOnly  bool
		Queued     bool
		Error      *string
		RetryAfter time.Duration
		Broke      bool
	}
	Retire *struct{ Broke bool }
	Do     *struct {
		Action  provisioning.ActionKind
		Node    provisioning.LogicalNodeID
		Attempt provisioning.NodeAttemptID
	}
	End *struct{ Incomplete bool }
}

func (t *teller) read(journal []byte) error {
	generation := uint64(0)
	var waiting []item
	number, read := 0, 0
	for text := range bytes.Lines(journal) {
		number++
		read += len(text)
		unsayable := func(format string, args ...any) error {
			return &UnsayableError{Line: number, What: fmt.Sprintf(format, args...)}
		}
		var line journalLine
		if err := json.Unmarshal(text, &line); err != nil {
			return unsayable("%v", err)
		}
		last := len(t.batches) - 1
		switch {
		case line.Journal != nil:
			c := line.Journal.Config
			word, err := configLine(c.Retry, c.GroupRetry, c.MaxInFlight, c.FirstAttempt, line.Journal.Shape.RunID)
			if err != nil {
				return unsayable("%v", err)
			}
			shape, err := t.shape(line.Journal.Shape)
			if err != nil {
				return unsayable("%v", err)
			}
			t.config, generation = word, line.Journal.Shape.Generation
			waiting = append(waiting, item{line: number, text: shape})
		case line.Update != nil:
			u := line.Update
			switch {
			case u.Refused != "":
				waiting = append(waiting, item{line: number, text: t.refusal(u.Shape, u.Refused)})
			case u.Drain:
				generation++
				waiting = append(waiting, item{line: number, text: fmt.Sprintf("shape %d # drain", generation)})
			default:
				shape, err := t.shape(*u.Shape)
				if err != nil {
					return unsayable("%v", err)
				}
				generation = u.Shape.Generation
				waiting = append(waiting, item{line: number, text: shape})
			}
		case line.Deliver != nil:
			o := line.Deliver.Observation
			if line.Deliver.Numbers != nil {
				return unsayable("an observation of a kind that has no name")
			}
			if o.Kind != provisioning.OperationCompleted {
				waiting = append(waiting, item{line: number, report: &o})
				if t.reported[o.Attempt] == "" {
					t.reported[o.Attempt] = o.Session
				}
				if _, joined := t.swactors[o.Attempt]; o.Kind == provisioning.SwactorJoined && !joined {
					t.swactors[o.Attempt] = o.Swactor
				}
				break
			}
			answered, err := t.answer(o.Completion, len(t.batches))
			if err != nil {
				return unsayable("%v", err)
			}
			if answered != nil {
				waiting = append(waiting, item{line: number, answered: answered})
			}
		case line.Pass != nil:
			if line.Pass.FoldOnly {
				t.notes = append(t.notes, "Then its host was closed: what was delivered after the last pass is not told.")
				return nil
			}
			t.batches = append(t.batches, batch{at: line.Pass.At, paused: line.Pass.Paused, items: waiting,
				current: make(map[provisioning.LogicalNodeID]provisioning.NodeAttemptID), changes: make(map[provisioning.LogicalNodeID]string)})
			waiting = nil
		case line.Submit != nil:
			s := line.Submit
			switch {
			case s.Broke:
				return unsayable("an executor that panicked")
			case s.Error != nil && s.RetryAfter > 0:
				return unsayable("a submission refused with a wait of %v", s.RetryAfter)
			case s.Queued && s.Error != nil:
				return unsayable("a submission both queued and refused")
			}
			c := &call{line: number, slot: s.Node, operation: s.Operation, kind: s.Kind, adoptOnly: s.AdoptOnly, queued: s.Queued,
				batch: last, refused: s.Error != nil}
			t.calls[s.Operation] = c
			t.ordered = append(t.ordered, c)
			t.batches[last].submitted = append(t.batches[last].submitted, c)
		case line.Expire != nil:
			x := line.Expire
			if x.Broke || x.Numbers != nil {
				return unsayable("an executor that panicked, or answered with what has no name")
			}
			c := t.calls[x.Operation]
			switch {
			case c == nil:
				return unsayable("the deadline of an operation that was not submitted")
			case x.Answer.Class == provisioning.ClassNotStarted && !c.queued:
				return unsayable("a call that came too late to the provider (NotStarted)")
			case x.Answer.Class == provisioning.ClassNotStarted, x.Answer.Class == provisioning.ClassAmbiguous:
				c.expired, c.unbegun = true, x.Answer.Class == provisioning.ClassNotStarted
				if c.queued && !c.unbegun { // it ran, so what it waited for had returned
					t.batches[last].items = append(t.batches[last].items, item{line: number, began: c})
				}
				continue
			}
			// Its answer had come and was not delivered yet.
			answered, err := t.answer(x.Answer, last)
			if err != nil {
				return unsayable("%v", err)
			}
			if answered != nil {
				t.batches[last].items = append(t.batches[last].items, item{line: number, answered: answered})
			}
		case line.Retire != nil && line.Retire.Broke:
			return unsayable("an executor that panicked")
		case line.End != nil && line.End.Incomplete:
			return unsayable("a pass that an executor broke off")
		case line.End != nil:
			t.told = read
		case line.Do != nil:
			switch line.Do.Action {
			case provisioning.Insert, provisioning.Restart:
				t.batches[last].current[line.Do.Node] = line.Do.Attempt
			}
		}
	}
	return nil
}

// answer notes what a call came to. It returns nil for one that counts no more:
// it comes for the second time, or after the deadline.
func (t *teller) answer(c provisioning.Completion, batch int) (*call, error) {
	asked := t.calls[c.Operation]
	if asked == nil || asked.answer != nil || asked.expired || asked.refused {
		return nil, nil
	}
	switch {
	case c.Class == provisioning.ClassNotStarted:
		return nil, errors.New("a call that came too late to the provider (NotStarted)")
	case c.RetryAfter > 0 && c.Class != provisioning.ClassDefinite:
		return nil, fmt.Errorf("a wait of %v asked for with an answer that is %v", c.RetryAfter, c.Class)
	}
	if c.Class == provisioning.ClassNone &&
		(asked.kind == provisioning.CreateLease && c.Lease == "" || asked.kind == provisioning.StartBootstrap && c.Session == "") {
		c.Class = provisioning.ClassAmbiguous // so it is read
	}
	asked.answer, asked.answered = &c, batch
	if asked.kind == provisioning.StartBootstrap && c.Class == provisioning.ClassNone {
		t.sessions[c.Operation.Attempt] = append(t.sessions[c.Operation.Attempt], startedSession{batch, c.Session})
	}
	return asked, nil
}

// configLine says the configuration, or which part of it no scenario can have.
func configLine(retry provisioning.RetryPolicy, groups map[provisioning.NodeGroupID]provisioning.RetryPolicy,
	maxInFlight int, first provisioning.NodeAttemptID, runID provisioning.RunID) (string, error) {
	switch {
	case len(groups) > 0:
		return "", errors.New("a retry policy of a group (GroupRetry)")
	case first != 1:
		return "", fmt.Errorf("FirstAttempt %d", first)
	case retry.Jitter != 0 && runID != run:
		return "", fmt.Errorf("Jitter %v, which is drawn from the run", retry.Jitter)
	case retry.MaxRetryAfter != provisioning.DefaultMaxRetryAfter:
		return "", fmt.Errorf("MaxRetryAfter %v", retry.MaxRetryAfter)
	}
	for kind, timeout := range retry.OperationTimeouts {
		if kind != provisioning.CancelBootstrap && timeout != retry.OperationTimeout ||
			kind == provisioning.CancelBootstrap && timeout != provisioning.DefaultCancelTimeout {
			return "", fmt.Errorf("a timeout of %v for %v", timeout, kind)
		}
	}
	words := []string{"config"}
	usual := defaults().retry
	add := func(key string, value, usual any) {
		if value != usual {
			words = append(words, fmt.Sprintf("%s=%v", key, value))
		}
	}
	add("initial", retry.InitialDelay, usual.InitialDelay)
	add("max", retry.MaxDelay, usual.MaxDelay)
	add("jitter", retry.Jitter, usual.Jitter)
	add("timeout", retry.OperationTimeout, usual.OperationTimeout)
	add("probe", retry.EndpointProbeInterval, usual.EndpointProbeInterval)
	add("endpoint-timeout", retry.EndpointTimeout, usual.EndpointTimeout)
	add("bootstrap-timeout", retry.BootstrapTimeout, usual.BootstrapTimeout)
	add("stable-after", retry.StableAfter, usual.StableAfter)
	add("cancel-limit", retry.CancelLimit, usual.CancelLimit)
	add("max-in-flight", maxInFlight, 0)
	return strings.Join(append(words, "bootstrap=manual", "drive=manual"), " "), nil
}

// What a word of the language may look like.
var (
	groupPattern = regexp.MustCompile(`^[^\s:#]+$`)
	imagePattern = regexp.MustCompile(`^[^\s#]+$`)
	namePattern  = regexp.MustCompile(`^[^\s#]+$`)
)

// shape says a wish. Of a spec a scenario has the image alone; what else differs
// gives it another name.
func (t *teller) shape(shape provisioning.ClusterShape) (string, error) {
	words := []string{"shape", fmt.Sprint(shape.Generation)}
	for _, group := range shape.Groups {
		if !groupPattern.MatchString(string(group.GroupID)) {
			return "", fmt.Errorf("a group called %q", group.GroupID)
		}
		word, err := t.image(group)
		if err != nil {
			return "", err
		}
		words = append(words, fmt.Sprintf("%s:%d@%s", group.GroupID, group.Count, word))
	}
	return strings.Join(words, " "), nil
}

func (t *teller) image(group provisioning.NodeGroupSpec) (string, error) {
	group.Count = 1
	desired, err := provisioning.Expand(provisioning.ClusterShape{RunID: group.RunID, Generation: 1, Groups: []provisioning.NodeGroupSpec{group}})
	if group.RunID == "" {
		desired, err = provisioning.Expand(provisioning.ClusterShape{RunID: run, Generation: 1, Groups: []provisioning.NodeGroupSpec{group}})
	}
	if err != nil {
		return "", err
	}
	var spec provisioning.LogicalNodeSpec
	for s := range desired.All() {
		spec = s
	}
	known := t.images[group.GroupID]
	for _, k := range known {
		if k.spec.Equal(spec) {
			return k.word, nil
		}
	}
	word := group.Shape.Image
	if !imagePattern.MatchString(word) {
		word = "image"
	}
	for i, base := 2, word; slices.ContainsFunc(known, func(k imageWord) bool { return k.word == word }); i++ {
		word = fmt.Sprintf("%s~%d", base, i)
	}
	t.images[group.GroupID] = append(known, imageWord{spec, word})
	return word, nil
}

// refusal says that a wish was refused, in a comment where a scenario would not
// refuse it: it changed nothing.
func (t *teller) refusal(shape *provisioning.ClusterShape, why string) string {
	comment := "# an update was refused: " + oneLine(why)
	if shape == nil {
		return comment
	}
	for _, rule := range []error{provisioning.ErrGenerationRegressed, provisioning.ErrGenerationReused} {
		if strings.HasPrefix(why, rule.Error()) {
			if text, err := t.shape(*shape); err == nil {
				return "reject " + text
			}
		}
	}
	return comment
}

func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
}

// replay repeats the passes that are told, and notes what changes in each.
func (t *teller) replay(journal []byte) (provisioning.ReplayReport, error) {
	pass := 0
	options := provisioning.ReplayOptions{OnEvent: func(e provisioning.Event) {
		if e.Kind == provisioning.EventPass {
			pass++
		}
		if pass >= len(t.batches) {
			return
		}
		changes := t.batches[pass].changes
		switch e.Kind {
		case provisioning.EventStage:
			changes[e.Node] = fmt.Sprintf("attempt=%d stage=%v", e.Attempt, e.To)
		case provisioning.EventAttemptStarted:
			changes[e.Node] = fmt.Sprintf("attempt=%d", e.Attempt)
		case provisioning.EventReaped:
			changes[e.Node] = "gone"
		}
	}}
	report, err := provisioning.ReplayWith(bytes.NewReader(journal[:t.told]), options)
	switch {
	case err != nil:
		return report, err
	case report.Difference != nil:
		return report, &UnsayableError{Line: report.Difference.Line, What: "this version of the library does something else"}
	case report.Passes < len(t.batches):
		return report, &UnsayableError{What: fmt.Sprintf("%d of %d passes were repeated", report.Passes, len(t.batches))}
	}
	return report, nil
}

// settle finds out what became of each call that nobody was told about.
func (t *teller) settle() error {
	byAttempt := make(map[provisioning.NodeAttemptID][]*call)
	for _, c := range t.ordered {
		byAttempt[c.operation.Attempt] = append(byAttempt[c.operation.Attempt], c)
		c.hangs = !c.refused && !c.unbegun && (c.answer == nil || !c.queued && c.answered > c.batch+1)
	}
	for _, c := range t.ordered {
		// What an adopt-only create finds, an earlier one has made.
		if !c.adoptOnly || c.answer == nil ||
			c.answer.Class != provisioning.ClassNone && (c.answer.Class != provisioning.ClassLeaseLost || c.answer.Lease == "") {
			continue
		}
		var maker *call
		for _, earlier := range byAttempt[c.operation.Attempt] {
			if earlier.kind == provisioning.CreateLease && !earlier.adoptOnly && !earlier.refused && !earlier.unbegun &&
				(earlier.answer == nil || earlier.answer.Class == provisioning.ClassAmbiguous) {
				maker = earlier
			}
		}
		if maker == nil {
			return &UnsayableError{Line: c.line, What: "a machine was adopted for which no create is known"}
		}
		maker.effect = true
	}
	return nil
}

// outcome is the word for what a call came to.
func (c *call) outcome() string {
	lost := provisioning.Completion{Class: provisioning.ClassAmbiguous}
	answer := c.answer
	if answer == nil {
		answer = &lost
	}
	switch {
	case answer.Class == provisioning.ClassDefinite && answer.RetryAfter > 0:
		return fmt.Sprintf("retry-after=%v", answer.RetryAfter)
	case answer.Class == provisioning.ClassDefinite:
		return "definite"
	case answer.Class == provisioning.ClassAmbiguous && c.effect:
		return "done-ambiguous"
	case answer.Class == provisioning.ClassAmbiguous:
		return "ambiguous"
	case answer.Class == provisioning.ClassLeaseLost && c.kind == provisioning.CreateLease && answer.Lease != "":
		return "dead"
	case answer.Class == provisioning.ClassLeaseLost:
		return "lost"
	case c.kind == provisioning.CreateLease && answer.Endpoint == nil:
		return "ok-no-endpoint"
	case c.kind == provisioning.LookupEndpoint && answer.Endpoint == nil:
		return "not-ready"
	}
	return "ok"
}

func (t *teller) line(format string, args ...any) { fmt.Fprintf(&t.out, format+"\n", args...) }

func (t *teller) tell(title string, report provisioning.ReplayReport) error {
	if err := t.settle(); err != nil {
		return err
	}
	t.line("# %s", oneLine(title))
	t.line("#")
	t.line("# %d passes in %v, each at its time and with what was known by then. Ids, texts, addresses and numbers of lines are", len(t.batches), report.Last.Sub(report.First))
	t.line("# those of the fake provider; calls that nobody was told about end where the next one shows that they had.")
	for _, note := range t.notes {
		t.line("# %s", note)
	}
	t.line("%s", t.config)

	now := t.batches[0].at
	paused := false
	attempts := make(map[provisioning.LogicalNodeID]provisioning.NodeAttemptID)
	for i := range t.batches {
		b := &t.batches[i]
		if passed := b.at.Sub(now); passed > 0 {
			t.line("advance %v", passed)
		}
		now = b.at
		if err := t.tellBatch(i, attempts, b.paused != paused); err != nil {
			return err
		}
		paused = b.paused
		for slot, attempt := range b.current {
			attempts[slot] = attempt
		}
		for _, slot := range sortedSlots(b.changes) {
			t.line("expect %s %s", slot, b.changes[slot])
		}
	}
	t.tellEnd(report)
	return nil
}

// tellBatch says what comes before a pass, and the pass.
func (t *teller) tellBatch(i int, attempts map[provisioning.LogicalNodeID]provisioning.NodeAttemptID, pauseChanges bool) error {
	b := &t.batches[i]
	for _, c := range b.submitted {
		switch {
		case c.refused:
			t.line("script %s %s refuse", c.slot, operationWord(c.kind))
		case c.hangs:
			t.line("script %s %s hang", c.slot, operationWord(c.kind))
		case !c.unbegun && c.outcome() != "ok":
			t.line("script %s %s %s", c.slot, operationWord(c.kind), c.outcome())
		case !c.unbegun: // said all the same: the next word is for the next call
			t.line("script %s %s ok", c.slot, operationWord(c.kind))
		}
		// A call that is not queued shows that the ones before have returned.
		if !c.queued && !c.refused {
			t.release(c)
		}
	}

	// Of each slot the reports that came before its answer, then the answers,
	// then the rest.
	answered := make(map[provisioning.NodeAttemptID]bool)
	var before, after []item
	news := false
	for _, it := range b.items {
		switch {
		case it.answered != nil:
			c := it.answered
			answered[c.operation.Attempt], news = true, true
			if c.queued {
				t.release(c)
			}
			if c.hangs {
				t.line("release %s %s %s", c.slot, operationWord(c.kind), c.outcome())
				c.returned = true
			}
		case it.began != nil:
			t.release(it.began)
		case it.report != nil && answered[it.report.Attempt]:
			after = append(after, it)
		default:
			before = append(before, it)
		}
	}
	for _, it := range before {
		queues, err := t.tellItem(i, it, attempts)
		if err != nil {
			return err
		}
		news = news || queues
	}
	if len(after) > 0 {
		t.line("answer")
		for _, it := range after {
			if _, err := t.tellItem(i, it, attempts); err != nil {
				return err
			}
		}
	}
	if pauseChanges {
		t.line("%s", map[bool]string{true: "pause", false: "resume"}[b.paused])
		news = true
	}
	if !news {
		t.line("trigger")
	}
	t.line("pass")
	return nil
}

// release lets the calls of an attempt return that are before c and expired.
func (t *teller) release(c *call) {
	for _, earlier := range t.ordered {
		if earlier == c {
			return
		}
		if earlier.operation.Attempt == c.operation.Attempt && earlier.hangs && earlier.answer == nil && !earlier.returned {
			t.line("release %s %s %s # it had come to an end by now", earlier.slot, operationWord(earlier.kind), earlier.outcome())
			earlier.returned = true
		}
	}
}

// tellItem says a wish or a report, and whether that queues a pass.
func (t *teller) tellItem(i int, it item, attempts map[provisioning.LogicalNodeID]provisioning.NodeAttemptID) (queues bool, err error) {
	if it.report == nil {
		t.line("%s", it.text)
		return strings.HasPrefix(it.text, "shape"), nil
	}
	o := it.report
	unsayable := func(format string, args ...any) (bool, error) {
		return false, &UnsayableError{Line: it.line, What: fmt.Sprintf(format, args...)}
	}
	if _, err := parseSlot(string(o.Node)); err != nil || !namePattern.MatchString(string(o.Node)) {
		return unsayable("a report about %q", o.Node)
	}
	if o.Attempt == 0 {
		return unsayable("a report about attempt 0 of %s", o.Node)
	}
	if o.Kind == provisioning.ReplaceRequested {
		if attempts[o.Node] != o.Attempt {
			t.line("# attempt %d of %s was to be replaced and was over", o.Attempt, o.Node)
			return false, nil
		}
		t.line("replace %s", o.Node)
		return true, nil
	}
	stranger := o.Kind != provisioning.NodeLost && o.Session != t.session(o.Attempt, i)
	if stranger && (o.Session == "" || o.Kind == provisioning.SwactorJoined || !namePattern.MatchString(string(o.Session))) {
		return unsayable("a %v of %s under session %q, which is not that of its bootstrap", o.Kind, o.Node, o.Session)
	}
	words := []string{"event", string(o.Node)}
	switch o.Kind {
	case provisioning.SwactorJoined:
		words = append(words, "joined")
		if o.Swactor != t.swactors[o.Attempt] {
			if !namePattern.MatchString(string(o.Swactor)) {
				return unsayable("an agent called %q", o.Swactor)
			}
			words = append(words, "id="+string(o.Swactor))
		}
	case provisioning.BootstrapClosed:
		words = append(words, "closed")
	case provisioning.BootstrapFailed:
		words = append(words, "failed")
	case provisioning.NodeLost:
		words = append(words, "lost")
	case provisioning.BootstrapProgress:
		if o.Stage == provisioning.NoBootstrapStage {
			t.line("# %s was read from, and told no stage", o.Node)
			return false, nil
		}
		words = append(words, fmt.Sprintf("stage=%v", o.Stage))
	default:
		return unsayable("a report of kind %v", o.Kind)
	}
	if stranger {
		words = append(words, "id="+string(o.Session))
	}
	t.line("%s attempt=%d", strings.Join(words, " "), o.Attempt)
	return true, nil
}

// session is the one that the fake has for an attempt at the time of a batch: of
// the last start, before there was one that of the first to come, and where none
// was answered the one that was heard of.
func (t *teller) session(attempt provisioning.NodeAttemptID, batch int) provisioning.BootstrapSessionID {
	var id provisioning.BootstrapSessionID
	for _, s := range t.sessions[attempt] {
		if id == "" || s.batch <= batch {
			id = s.id
		}
	}
	return cmp.Or(id, t.reported[attempt])
}

func sortedSlots[V any](m map[provisioning.LogicalNodeID]V) []provisioning.LogicalNodeID {
	slots := make([]provisioning.LogicalNodeID, 0, len(m))
	for slot := range m {
		slots = append(slots, slot)
	}
	slices.SortFunc(slots, func(a, b provisioning.LogicalNodeID) int {
		return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
	})
	return slots
}

// tellEnd says what has come of it.
func (t *teller) tellEnd(report provisioning.ReplayReport) {
	d := report.Driver
	state, now := d.Snapshot(), d.Clock(report.Last)
	moment := func(at time.Time) string { return momentWord(at.Sub(now), !at.IsZero()) }
	t.line("# What has come of it.")
	slots := []string{"expect", "slots"}
	for node := range state.All() {
		slots = append(slots, string(node.Record.Node))
	}
	t.line("%s", strings.Join(slots, " "))
	for node := range state.All() {
		pending := provisioning.NoOperation
		if node.Pending != nil {
			pending = node.Pending.Kind
		}
		t.line("expect %s attempt=%d stage=%v intent=%v ready=%v lease=%v session=%v pending=%s ambiguous=%s failures=%d cleanup-failures=%d next=%s restart=%s deadline=%s",
			node.Record.Node, node.Attempt, node.Record.Stage, node.Intent, node.Record.Ready,
			node.Record.Lease != "", node.ActiveBootstrap != "", operationWord(pending), operationWord(node.Retry.Ambiguous),
			node.Retry.ConsecutiveFailures, node.Retry.CleanupFailures,
			moment(node.Retry.NextEffectAt), moment(node.Retry.RestartAt), moment(node.Retry.StageDeadline))
	}
	at, ok := d.RequeueAt()
	t.line("expect requeue %s", momentWord(at.Sub(report.Last), ok))
	t.line("expect converged %v", d.Converged(d.Generation()))
	ready, desired := d.Progress()
	t.line("expect progress %d/%d", ready, desired)
	t.line("expect observed %d", d.ObservedGeneration())
	t.line("expect attempts %d", state.NextAttemptID-1)
}
