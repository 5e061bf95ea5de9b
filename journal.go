package provisioning

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"reflect"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// JournalSchema is the version of the journal that this release writes and
// reads. It stands in the first line.
const JournalSchema = 1

// journal writes down what a driver is given and what it makes of it, a JSON
// object per line, in the order in which the passes consume it. The driver has
// none unless [Config.Journal] is set.
//
// The goroutine of the pass owns everything but waiting. All times are in the
// driver's clock: that one knows no step back, and a replay that is given its
// readings runs through the same ones.
type journal struct {
	sink    journalSink
	waiting []journalLine // offers and questions that no pass has taken; guarded by ClusterDriver.in
	taken   []journalLine
	text    bytes.Buffer
	folding bool // the pass only folds

	touched []*node // since the last end of a pass; some more than once
	sums    map[*node]uint64
	sum     uint64 // of sums, modulo 2^64
	room    []byte // for node.sum
}

// journalSink takes the lines of a journal. flush says that they should reach
// whoever keeps them before anything else happens.
type journalSink interface {
	put(line []byte)
	flush()
	fault() error
}

// journalLine has one field that is set, by which a line is known.
type journalLine struct {
	Journal *journalHead     `json:"journal,omitempty"` // the first line
	Update  *journalOffer    `json:"update,omitempty"`
	Due     *journalMoment   `json:"due,omitempty"` // TriggerIfDue
	Deliver *journalDelivery `json:"deliver,omitempty"`
	Pass    *journalPass     `json:"pass,omitempty"` // begins: all above are taken
	Expire  *journalExpiry   `json:"expire,omitempty"`
	Submit  *journalSubmit   `json:"submit,omitempty"`
	Retire  *journalRetire   `json:"retire,omitempty"`
	Do      *journalAction   `json:"do,omitempty"`
	Fault   *journalFault    `json:"fault,omitempty"`
	End     *journalEnd      `json:"end,omitempty"` // of the pass
}

type journalHead struct {
	Schema int             `json:"schema"`
	Config journalConfig   `json:"config"`
	Shape  json.RawMessage `json:"shape"`
}

// journalConfig is what of a Config can be told, defaults applied; durations
// are in nanoseconds.
type journalConfig struct {
	Retry        RetryPolicy                 `json:"retry"`
	GroupRetry   map[NodeGroupID]RetryPolicy `json:"groupRetry,omitempty"`
	MaxInFlight  int                         `json:"maxInFlight"`
	MaxNodes     int                         `json:"maxNodes"`
	FirstAttempt NodeAttemptID               `json:"firstAttempt"`
}

type journalOffer struct {
	// Shape is missing if JSON cannot express it (a number that is none); it
	// was then refused.
	Shape   json.RawMessage `json:"shape,omitempty"`
	Faults  []ShapeFault    `json:"faults,omitempty"` // found by ValidateGroup
	Drain   bool            `json:"drain,omitempty"`
	Refused string          `json:"refused,omitempty"`
}

type journalMoment struct {
	At time.Time `json:"at"`
}

type journalDelivery struct {
	Observation
	// Numbers are kind, stage, and kind and class of the completion, of an
	// observation that holds one without a name. Those fields are then zero.
	Numbers *[4]uint8 `json:"numbers,omitempty"`
}

type journalPass struct {
	At       time.Time `json:"at"`
	FoldOnly bool      `json:"foldOnly,omitempty"`
	Paused   bool      `json:"paused,omitempty"` // growth was to stop when it began
}

type journalExpiry struct {
	Operation OperationID `json:"operation"`
	Answer    Completion  `json:"answer,omitzero"`
	Numbers   *[4]uint8   `json:"numbers,omitempty"` // as in journalDelivery
	Broke     bool        `json:"broke,omitempty"`   // the executor panicked
}

type journalSubmit struct {
	Operation OperationID   `json:"operation"`
	Kind      OperationKind `json:"kind"`
	Node      LogicalNodeID `json:"node"`
	AdoptOnly bool          `json:"adoptOnly,omitempty"`
	Queued    bool          `json:"queued,omitempty"`
	Error     *string       `json:"error,omitempty"`
	// Class is that of every refusal. RetryAfter is in nanoseconds.
	Class      FailureClass  `json:"class,omitempty"`
	RetryAfter time.Duration `json:"retryAfter,omitempty"`
	Broke      bool          `json:"broke,omitempty"`
}

type journalRetire struct {
	Attempt NodeAttemptID `json:"attempt"`
	Broke   bool          `json:"broke,omitempty"`
}

type journalAction struct {
	Action    ActionKind    `json:"action"`
	Node      LogicalNodeID `json:"node"`
	Rule      string        `json:"rule"`
	Attempt   NodeAttemptID `json:"attempt"` // that it is about or, of an Insert or Restart, that it begins
	Operation OperationKind `json:"operation,omitempty"`
	Sequence  uint64        `json:"sequence,omitempty"`
}

type journalFault struct {
	Node    LogicalNodeID `json:"node"`
	Attempt NodeAttemptID `json:"attempt,omitempty"`
	Rule    string        `json:"rule"`
	Error   string        `json:"error"`
}

type journalEnd struct {
	Pass       uint64    `json:"pass"` // how many have begun
	Observed   uint64    `json:"observedGeneration"`
	Next       uint64    `json:"nextAttemptId"`
	Nodes      int       `json:"nodes"`
	Ready      int       `json:"ready"`
	Desired    int       `json:"desired"`
	Converged  bool      `json:"converged"`
	Again      bool      `json:"again"` // its own transitions ask for another pass
	RequeueAt  time.Time `json:"requeueAt,omitzero"`
	State      string    `json:"state"`                // a digest of all nodes
	Incomplete bool      `json:"incomplete,omitempty"` // the executor broke it off
}

// newJournal returns the journal of a driver that is new, and writes its first
// line.
func newJournal(sink journalSink, d *ClusterDriver, shape ClusterShape) *journal {
	j := &journal{sink: sink, sums: make(map[*node]uint64)}
	c := &d.config
	j.add(journalLine{Journal: &journalHead{Schema: JournalSchema, Shape: shapeText(shape), Config: journalConfig{
		Retry: c.Retry, GroupRetry: c.GroupRetry, MaxInFlight: c.MaxInFlight, MaxNodes: c.MaxNodes,
		FirstAttempt: d.state.NextAttemptID,
	}}})
	sink.flush()
	return j
}

// shapeText returns a shape as JSON, or nil if there is none for it. Such a
// shape is refused.
func shapeText(shape ClusterShape) json.RawMessage {
	var text bytes.Buffer
	if writeExact(&text, shape) != nil {
		return nil
	}
	return text.Bytes()
}

// offer keeps an offer until a pass takes it. The caller holds in.
func (j *journal) offer(o *journalOffer, err error) {
	if err != nil {
		o.Refused = err.Error()
	}
	j.waiting = append(j.waiting, journalLine{Update: o})
}

// due keeps the question whether a pass is due; of several in a row the last
// says all. The caller holds in.
func (j *journal) due(at instant) {
	line := journalLine{Due: &journalMoment{at.time()}}
	if last := len(j.waiting) - 1; last >= 0 && j.waiting[last].Due != nil {
		j.waiting[last] = line
		return
	}
	j.waiting = append(j.waiting, line)
}

// take takes what waits to the pass. The caller holds in.
func (j *journal) take() {
	j.taken, j.waiting = j.waiting, j.taken[:0]
}

// addTaken writes what was taken.
func (j *journal) addTaken() {
	for i := range j.taken {
		j.add(j.taken[i])
		j.taken[i] = journalLine{}
	}
	j.taken = j.taken[:0]
}

// begin writes down what a pass has taken, before it does anything with it.
func (j *journal) begin(d *ClusterDriver, at instant, foldOnly bool) {
	j.addTaken()
	for _, block := range d.folding.blocks {
		for i := range block {
			delivery := deliveryOf(block[i])
			j.add(journalLine{Deliver: &delivery})
		}
	}
	j.folding = foldOnly
	j.add(journalLine{Pass: &journalPass{at.time(), foldOnly, !foldOnly && d.pause.asked}})
	j.sink.flush()
}

// did writes down an action that was taken.
func (j *journal) did(n *node, chosen *decision) {
	line := &journalAction{Action: chosen.action, Node: n.id, Rule: chosen.Rule.String(), Attempt: n.attempt}
	if chosen.action == Dispatch {
		line.Operation, line.Sequence = n.pending, n.pendingSequence
	}
	j.add(journalLine{Do: line})
}

// end writes down what a pass has come to.
func (j *journal) end(d *ClusterDriver, whole bool, requeueAt instant) {
	for _, n := range j.touched {
		j.sum -= j.sums[n]
		if d.state.find(n.id) != n {
			delete(j.sums, n)
			continue
		}
		var sum uint64
		sum, j.room = n.sum(j.room)
		j.sums[n] = sum
		j.sum += sum
	}
	empty(&j.touched)
	j.add(journalLine{End: &journalEnd{
		Pass: d.stats.Passes, Observed: d.state.ObservedGeneration, Next: uint64(d.state.NextAttemptID),
		Nodes: d.state.Len(), Ready: d.ready, Desired: d.working.slots,
		Converged: d.settled == d.working.slots && d.settled == d.state.Len(),
		Again:     d.ownDirt, RequeueAt: requeueAt.time(), State: fmt.Sprintf("%016x", j.sum),
		Incomplete: !whole && !j.folding,
	}})
	j.sink.flush()
}

// touch remembers a node that changes. There is one call for each way in which
// a node can change, so that the digest of a pass costs what changed in it.
func (j *journal) touch(n *node) {
	if last := len(j.touched) - 1; last < 0 || j.touched[last] != n {
		j.touched = append(j.touched, n)
	}
}

// sum returns a digest of everything that is observed of a node. The room is
// the caller's, and returned to be used again.
func (n *node) sum(room []byte) (sum uint64, _ []byte) {
	b := append(room[:0], n.template.digest[:]...)
	texts := [...]string{string(n.id), string(n.lease), string(n.session), string(n.bootSession), string(n.swactor),
		n.failedReason, n.lastError}
	for i := range texts {
		b = binary.AppendUvarint(b, uint64(len(texts[i])))
		b = append(b, texts[i]...)
	}
	numbers := [...]uint64{uint64(n.attempt), uint64(n.index), n.nextSequence, n.stdoutSequence, n.stderrSequence,
		uint64(n.nextEffectAt), uint64(n.restartAt), uint64(n.stageDeadline), uint64(n.lastObservedAt),
		uint64(n.joinedAt), uint64(n.handedOffAt), uint64(n.readyAt), uint64(n.lastCreateAt), uint64(n.failedAt), uint64(n.destroyedAt), uint64(n.lastFailureAt),
		uint64(n.failures), uint64(n.cleanupFailures), uint64(n.failuresBeforeReady), uint64(n.createsSent), uint64(n.cancelsFailed)}
	for _, number := range numbers {
		b = binary.AppendUvarint(b, number)
	}
	b = append(b, byte(n.stage), byte(n.intent), asByte(n.ready), byte(n.ambiguous), byte(n.bootStage), byte(n.givenUp),
		byte(n.pending), asByte(n.endpoint != nil))
	if n.pending != NoOperation {
		b = append(b, asByte(n.resolving))
		b = binary.AppendUvarint(b, n.pendingSequence)
		b = binary.AppendUvarint(b, uint64(n.pendingDeadline))
	}
	if n.endpoint != nil {
		b = binary.AppendUvarint(b, uint64(n.endpoint.Port))
		b = append(b, n.endpoint.Host...)
	}
	for _, o := range n.held {
		text, err := json.Marshal(deliveryOf(o))
		if err != nil {
			panic(fmt.Sprintf("provisioning: no JSON for what %s holds: %v", n.id, err))
		}
		b = append(b, text...)
	}
	digest := sha256.Sum256(b)
	return binary.BigEndian.Uint64(digest[:]), b
}

func asByte(b bool) byte {
	if b {
		return 1
	}
	return 0
}

func deliveryOf(o Observation) journalDelivery {
	line := journalDelivery{Observation: o}
	c := &line.Completion
	if o.Kind >= observationKinds || o.Stage >= bootstrapStages || c.Kind >= operationKinds || c.Class >= failureClasses {
		line.Numbers = &[4]uint8{uint8(o.Kind), uint8(o.Stage), uint8(c.Kind), uint8(c.Class)}
		line.Kind, line.Stage, c.Kind, c.Class = 0, NoBootstrapStage, NoOperation, ClassNone
	}
	return line
}

func (l *journalDelivery) observation() Observation {
	o := l.Observation
	if n := l.Numbers; n != nil {
		o.Kind, o.Stage = ObservationKind(n[0]), BootstrapStage(n[1])
		o.Completion.Kind, o.Completion.Class = OperationKind(n[2]), FailureClass(n[3])
	}
	return o
}

// add hands a line to the sink.
func (j *journal) add(line journalLine) {
	j.text.Reset()
	if err := writeExact(&j.text, line); err != nil {
		panic(fmt.Sprintf("provisioning: no JSON for a line of the journal: %v", err))
	}
	j.sink.put(j.text.Bytes())
}

// journalledExecutor writes down what an executor answers to a pass.
type journalledExecutor struct {
	EffectExecutor
	journal *journal
}

func (x journalledExecutor) Submit(e Effect) (queued bool, err error) {
	line := &journalSubmit{Operation: e.Operation, Kind: e.Kind, Node: e.Key.Node, AdoptOnly: e.AdoptOnly, Broke: true}
	defer func() { x.journal.add(journalLine{Submit: line}) }()
	queued, err = x.EffectExecutor.Submit(e)
	line.Broke, line.Queued = false, queued
	if err != nil {
		text := err.Error()
		line.Error, line.Class, line.RetryAfter = &text, ClassNotStarted, retryAfterOf(err)
	}
	return queued, err
}

func (x journalledExecutor) Expire(id OperationID) (answer Completion) {
	line := &journalExpiry{Operation: id, Broke: true}
	defer func() { x.journal.add(journalLine{Expire: line}) }()
	answer = x.EffectExecutor.Expire(id)
	delivery := deliveryOf(Observation{Completion: answer})
	line.Broke, line.Answer, line.Numbers = false, delivery.Completion, delivery.Numbers
	return answer
}

func (x journalledExecutor) Retire(attempt NodeAttemptID) {
	line := &journalRetire{Attempt: attempt, Broke: true}
	defer func() { x.journal.add(journalLine{Retire: line}) }()
	x.EffectExecutor.Retire(attempt)
	line.Broke = false
}

// journalWriter is the sink of a Config. Every line carries a checksum of all
// lines up to it, so that a line that was changed, lost or moved is found.
type journalWriter struct {
	out  io.Writer
	sum  uint32
	text []byte // not written yet

	mu  sync.Mutex
	err error // the first; nothing is written after it
}

// maxSpareText is how large a buffer is kept for the next pass.
const maxSpareText = 1 << 20

const sealLength = len(`,"crc":"00000000"}`)

var journalTable = crc32.MakeTable(crc32.Castagnoli)

// appendSealed appends a line with its checksum and its end, and returns the
// checksum that the next one goes on from.
func appendSealed(to, line []byte, sum uint32) ([]byte, uint32) {
	sum = crc32.Update(sum, journalTable, line)
	to = append(to, line[:len(line)-1]...)
	return append(appendSeal(to, sum), '\n'), sum
}

// appendSeal appends what a sealed line ends in, in the place of its '}'.
func appendSeal(to []byte, sum uint32) []byte {
	to = append(to, `,"crc":"`...)
	to = hex.AppendEncode(to, binary.BigEndian.AppendUint32(nil, sum))
	return append(to, `"}`...)
}

func (w *journalWriter) put(line []byte) { w.text, w.sum = appendSealed(w.text, line, w.sum) }

func (w *journalWriter) flush() {
	text := w.text
	w.text = text[:0]
	if cap(text) > maxSpareText {
		w.text = nil
	}
	if w.fault() != nil || len(text) == 0 {
		return
	}
	err := errors.New("provisioning: the journal's writer did not return")
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("provisioning: the journal's writer panicked: %v", cause)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		w.err = err
	}()
	n, failure := w.out.Write(text)
	if failure == nil && n < len(text) {
		failure = io.ErrShortWrite
	}
	err = nil
	if failure != nil {
		err = fmt.Errorf("provisioning: writing the journal: %w", failure)
	}
}

func (w *journalWriter) fault() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// JournalErr returns the first error of [Config.Journal], after which nothing
// more is written to it, or nil. Passes go on.
func (d *ClusterDriver) JournalErr() error {
	if d.journal == nil {
		return nil
	}
	return d.journal.sink.fault()
}

// JSON has no text but UTF-8, and a provider may say anything. A text that is
// none is written as this prefix and its bytes in base64; so is one that begins
// with the prefix.
const exactPrefix = "\x00b64:"

// writeExact writes v as JSON that readExact reads back to the same bytes.
func writeExact(to *bytes.Buffer, v any) error {
	start := to.Len()
	encoder := json.NewEncoder(to)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(v); err != nil {
		return err
	}
	// \ufffd is how encoding/json writes what it replaces.
	if text := to.Bytes()[start:]; bytes.Contains(text, []byte(`\ufffd`)) || bytes.Contains(text, []byte(`\u0000b64:`)) {
		to.Truncate(start)
		if err := encoder.Encode(mapTexts(reflect.ValueOf(v), exactText).Interface()); err != nil {
			return err
		}
	}
	to.Truncate(to.Len() - 1) // the end of the line
	return nil
}

func readExact(text []byte, v any) error {
	if err := json.Unmarshal(text, v); err != nil {
		return err
	}
	if bytes.Contains(text, []byte(`\u0000b64:`)) {
		to := reflect.ValueOf(v).Elem()
		to.Set(mapTexts(to, originalText))
	}
	return nil
}

func exactText(s string) string {
	if utf8.ValidString(s) && !strings.HasPrefix(s, exactPrefix) {
		return s
	}
	return exactPrefix + base64.StdEncoding.EncodeToString([]byte(s))
}

func originalText(s string) string {
	coded, is := strings.CutPrefix(s, exactPrefix)
	original, err := base64.StdEncoding.DecodeString(coded)
	if !is || err != nil {
		return s
	}
	return string(original)
}

// mapTexts returns a copy of v in which every string is replaced.
func mapTexts(v reflect.Value, replace func(string) string) reflect.Value {
	to := reflect.New(v.Type()).Elem()
	to.Set(v)
	switch {
	case v.Kind() == reflect.String:
		to.SetString(replace(v.String()))
	case v.Kind() == reflect.Pointer && !v.IsNil():
		to.Set(reflect.New(v.Type().Elem()))
		to.Elem().Set(mapTexts(v.Elem(), replace))
	case v.Kind() == reflect.Slice && !v.IsNil():
		to.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
		for i := range v.Len() {
			to.Index(i).Set(mapTexts(v.Index(i), replace))
		}
	case v.Kind() == reflect.Map && !v.IsNil():
		to.Set(reflect.MakeMapWithSize(v.Type(), v.Len()))
		for entry := v.MapRange(); entry.Next(); {
			to.SetMapIndex(mapTexts(entry.Key(), replace), mapTexts(entry.Value(), replace))
		}
	case v.Kind() == reflect.Struct && v.Type() != reflect.TypeFor[time.Time]():
		for i := range v.NumField() {
			to.Field(i).Set(mapTexts(v.Field(i), replace))
		}
	}
	return to
}
