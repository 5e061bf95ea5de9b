package scenario

import (
	"bytes"
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
	told, err := tellJournal(title, journal)
	if err != nil {
		return "", err
	}
	for _, newest := range []bool{false, true} {
		if err := runTold(told, Options{NewestFirst: newest}); err != nil {
			return "", err
		}
	}
	return told, nil
}

// runTold runs a scenario that was told. That it goes another way is unsayable.
func runTold(told string, options Options) error {
	err := Run("the scenario", told, options)
	if failed, ok := errors.AsType[*Failure](err); ok {
		return &UnsayableError{What: fmt.Sprintf("told as a scenario it goes another way: at %q it should be %s and is %s",
			failed.Text, failed.Expected, failed.Found)}
	}
	return err
}

// tellJournal is FromJournal but for the runs.
func tellJournal(title string, journal []byte) (string, error) {
	t := &teller{
		calls:    make(map[provisioning.OperationID]*call),
		attempts: make(map[provisioning.NodeAttemptID][]*call),
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
	return t.out.String(), nil
}

// teller turns a journal into a scenario.
type teller struct {
	config   string
	batches  []batch // each ends with its pass
	calls    map[provisioning.OperationID]*call
	ordered  []*call
	attempts map[provisioning.NodeAttemptID][]*call // the same, each in order
	images   map[provisioning.NodeGroupID][]imageWord
	sessions map[provisioning.NodeAttemptID][]startedSession
	// What is reported first, of the attempts.
	reported map[provisioning.NodeAttemptID]provisioning.BootstrapSessionID
	swactors map[provisioning.NodeAttemptID]provisioning.SwactorID
	notes    []string
	told     int // bytes of the journal

	// While it is read.
	number     int // of the line
	generation uint64
	waiting    []item // for the next pass

	out strings.Builder
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
	read := 0
	for text := range bytes.Lines(journal) {
		t.number++
		read += len(text)
		var line journalLine
		err := json.Unmarshal(text, &line)
		switch {
		case err != nil:
		case line.Journal != nil:
			err = t.readHead(&line)
		case line.Update != nil:
			err = t.readUpdate(&line)
		case line.Deliver != nil:
			err = t.readDelivery(&line)
		case line.Pass != nil && line.Pass.FoldOnly:
			t.notes = append(t.notes, "Then its host was closed: what was delivered after the last pass is not told.")
			return nil
		case line.Pass != nil:
			t.batches = append(t.batches, batch{at: line.Pass.At, paused: line.Pass.Paused, items: t.waiting,
				current: make(map[provisioning.LogicalNodeID]provisioning.NodeAttemptID), changes: make(map[provisioning.LogicalNodeID]string)})
			t.waiting = nil
		case line.Submit != nil:
			err = t.readSubmission(&line)
		case line.Expire != nil:
			err = t.readExpiry(&line)
		case line.Retire != nil && line.Retire.Broke:
			err = errPanicked
		case line.Do != nil && (line.Do.Action == provisioning.Insert || line.Do.Action == provisioning.Restart):
			t.now().current[line.Do.Node] = line.Do.Attempt
		case line.End != nil && line.End.Incomplete:
			err = errors.New("a pass that an executor broke off")
		case line.End != nil:
			t.told = read
		}
		if err != nil {
			return &UnsayableError{Line: t.number, What: err.Error()}
		}
	}
	return nil
}

var (
	errPanicked = errors.New("an executor that panicked")
	errTooLate  = errors.New("a call that came too late to the provider (NotStarted)")
	errNoName   = errors.New("something of a kind that has no name")
)

// now is the batch whose pass runs.
func (t *teller) now() *batch { return &t.batches[len(t.batches)-1] }

// wait puts down what the next pass will find.
func (t *teller) wait(it item) {
	it.line = t.number
	t.waiting = append(t.waiting, it)
}

func (t *teller) readHead(line *journalLine) (err error) {
	c, shape := line.Journal.Config, line.Journal.Shape
	if t.config, err = configLine(c.Retry, c.GroupRetry, c.MaxInFlight, c.FirstAttempt, shape.RunID); err != nil {
		return err
	}
	return t.wish(shape)
}

func (t *teller) wish(shape provisioning.ClusterShape) error {
	text, err := t.shape(shape)
	t.generation = shape.Generation
	t.wait(item{text: text})
	return err
}

func (t *teller) readUpdate(line *journalLine) error {
	switch u := line.Update; {
	case u.Refused != "":
		t.wait(item{text: t.refusal(u.Shape, u.Refused)})
	case u.Drain:
		t.generation++
		t.wait(item{text: "drain"})
	default:
		return t.wish(*u.Shape)
	}
	return nil
}

func (t *teller) readDelivery(line *journalLine) error {
	o := line.Deliver.Observation
	switch {
	case line.Deliver.Numbers != nil:
		return errNoName
	case o.Kind == provisioning.OperationCompleted:
		answered, err := t.answer(o.Completion, len(t.batches))
		if answered != nil {
			t.wait(item{answered: answered})
		}
		return err
	}
	t.wait(item{report: &o})
	if t.reported[o.Attempt] == "" {
		t.reported[o.Attempt] = o.Session
	}
	if _, joined := t.swactors[o.Attempt]; o.Kind == provisioning.SwactorJoined && !joined {
		t.swactors[o.Attempt] = o.Swactor
	}
	return nil
}

func (t *teller) readSubmission(line *journalLine) error {
	s := line.Submit
	switch {
	case s.Broke:
		return errPanicked
	case s.Error != nil && s.RetryAfter > 0:
		return fmt.Errorf("a submission refused with a wait of %v", s.RetryAfter)
	}
	c := &call{line: t.number, slot: s.Node, operation: s.Operation, kind: s.Kind, adoptOnly: s.AdoptOnly, queued: s.Queued,
		batch: len(t.batches) - 1, refused: s.Error != nil}
	t.calls[s.Operation] = c
	t.ordered = append(t.ordered, c)
	t.attempts[s.Operation.Attempt] = append(t.attempts[s.Operation.Attempt], c)
	t.now().submitted = append(t.now().submitted, c)
	return nil
}

func (t *teller) readExpiry(line *journalLine) error {
	x := line.Expire
	c := t.calls[x.Operation]
	switch {
	case x.Broke:
		return errPanicked
	case x.Numbers != nil:
		return errNoName
	case c == nil:
		return errors.New("the deadline of an operation that was not submitted")
	case x.Answer.Class == provisioning.ClassNotStarted && !c.queued:
		return errTooLate
	case x.Answer.Class == provisioning.ClassNotStarted:
		c.expired, c.unbegun = true, true
		return nil
	case x.Answer.Class == provisioning.ClassAmbiguous:
		c.expired = true
		if c.queued { // it ran, so what it waited for had returned
			t.now().items = append(t.now().items, item{line: t.number, began: c})
		}
		return nil
	}
	// Its answer had come and was not delivered yet.
	answered, err := t.answer(x.Answer, len(t.batches)-1)
	if answered != nil {
		t.now().items = append(t.now().items, item{line: t.number, answered: answered})
	}
	return err
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
		return nil, errTooLate
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
		return "", fmt.Errorf("a Jitter of %v, which is drawn from the run", retry.Jitter)
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
