package provisioning

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"time"
)

// Errors of a journal that cannot be read on, inside a [*JournalError].
var (
	// ErrJournalTruncated: it ends within a line or within a pass, as one
	// does whose process was killed.
	ErrJournalTruncated = errors.New("provisioning: the journal is cut off")
	// ErrJournalCorrupt: a line is not as it was written, or lines are
	// missing or not in their places.
	ErrJournalCorrupt = errors.New("provisioning: the journal is corrupt")
	// ErrJournalSchema: it was written in a schema that this version does not
	// read.
	ErrJournalSchema = errors.New("provisioning: the journal has another schema")
)

// JournalError says from which line on a journal is no good.
type JournalError struct {
	Line int // from 1
	Err  error
}

// Error names the line.
func (e *JournalError) Error() string { return fmt.Sprintf("%v: line %d", e.Err, e.Line) }

// Unwrap returns one of [ErrJournalTruncated], [ErrJournalCorrupt] and
// [ErrJournalSchema], perhaps with the cause, or the reader's error.
func (e *JournalError) Unwrap() error { return e.Err }

// ReplayOptions are for programs that show what happened. The zero value
// replays all of a journal.
type ReplayOptions struct {
	// Until, if not zero, ends the replay before the first pass or question
	// whether one is due that is later, and so before the updates that were
	// offered after that. It is in the driver's clock.
	Until time.Time
	// OnEvent is the [Config.OnEvent] of the driver.
	OnEvent func(Event)
}

// ReplayReport says how far a replay came and what it found.
type ReplayReport struct {
	Lines  int // that were repeated to the byte, the first included
	Inputs int // of those: updates, questions, deliveries, passes and answers of the executor
	Passes int
	// First and Last are the times of the first and of the last pass, in the
	// driver's clock.
	First, Last time.Time
	// Difference is the first line that came out differently; nil if none
	// did.
	Difference *ReplayDifference
	// Driver is the driver as it was left, to be asked for its Snapshot and
	// with Explain; nil if the first line is no good. After an error or a
	// difference in the midst of a pass it has not ended that pass's work.
	Driver *ClusterDriver
}

// ReplayDifference is a line that a replay writes differently.
type ReplayDifference struct {
	Line     int    // from 1
	Expected string // what the journal says
	Found    string // what the driver of this version does
}

// String returns the difference on three lines.
func (d *ReplayDifference) String() string {
	return fmt.Sprintf("line %d differs\nexpected %s\nfound    %s", d.Line, d.Expected, d.Found)
}

// Replay reads what a driver has written to its [Config.Journal] and repeats it:
// a new driver is given the same inputs in the same order, by an executor that
// gives the same answers, and writes a journal of its own, which is compared
// with the one that is read, byte for byte (checksums aside). It stops at the
// first difference.
//
// The error is a [*JournalError]. What comes before its line has been repeated,
// and the report is about that. A journal may end after any pass.
//
// Not in a journal are the hook's doings: a pass that OnEvent broke off with
// runtime.Goexit comes out differently. Nor is what only the executor knows:
// which calls still run. A submission that was queued shows that one did.
func Replay(r io.Reader) (ReplayReport, error) { return ReplayWith(r, ReplayOptions{}) }

// ReplayWith is [Replay] with options.
func ReplayWith(r io.Reader, options ReplayOptions) (ReplayReport, error) {
	p := &replayer{reader: bufio.NewReaderSize(r, 1<<16), options: options}
	p.run()
	if p.err != nil {
		return p.report, p.err
	}
	return p.report, nil
}

// replayer is all there is around the driver of a replay: what reads its
// inputs, the executor that answers it, and the sink that compares.
type replayer struct {
	reader  *bufio.Reader
	options ReplayOptions
	read    int    // lines
	fed     bool   // the clock was, since the last pass
	sum     uint32 // of them
	// ahead are lines that were read and not yet written by the driver. The
	// first is line report.Lines+1.
	ahead  [][]byte
	report ReplayReport
	err    *JournalError // ended by
}

// inputs are how lines begin that say what the driver was given.
var inputs = [...]string{`{"update":`, `{"due":`, `{"deliver":`, `{"pass":`, `{"expire":`, `{"submit":`, `{"retire":`}

func isInput(line []byte) bool {
	return slices.ContainsFunc(inputs[:], func(start string) bool { return bytes.HasPrefix(line, []byte(start)) })
}

// over: there was a difference or a line that is no good.
func (p *replayer) over() bool { return p.err != nil || p.report.Difference != nil }

// next reads a line, appends it to ahead and returns what it says: nil at the
// end, and after an error.
func (p *replayer) next() *journalLine {
	if !p.fetch() {
		return nil
	}
	return p.parse(p.ahead[len(p.ahead)-1])
}

// fetch reads a line, without its checksum, and appends it to ahead. It returns
// false at the end, and after an error.
func (p *replayer) fetch() bool {
	if p.err != nil {
		return false
	}
	text, err := p.reader.ReadBytes('\n')
	if errors.Is(err, io.EOF) && len(text) == 0 {
		return false
	}
	p.read++
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = ErrJournalTruncated
		}
		p.fail(err)
		return false
	}
	text, ok := p.unseal(text[:len(text)-1])
	if !ok {
		p.fail(ErrJournalCorrupt)
		return false
	}
	p.ahead = append(p.ahead, text)
	return true
}

func (p *replayer) parse(text []byte) *journalLine {
	var line journalLine
	if err := readExact(text, &line); err != nil {
		p.fail(fmt.Errorf("%w: %w", ErrJournalCorrupt, err))
		return nil
	}
	return &line
}

// unseal returns a line without its checksum. It writes on the line.
func (p *replayer) unseal(sealed []byte) ([]byte, bool) {
	cut := len(sealed) - sealLength
	if cut < 1 {
		return nil, false
	}
	p.sum = crc32.Update(p.sum, journalTable, sealed[:cut])
	p.sum = crc32.Update(p.sum, journalTable, []byte{'}'})
	var room [sealLength]byte
	if !bytes.Equal(sealed[cut:], appendSeal(room[:0], p.sum)) {
		return nil, false
	}
	sealed[cut] = '}'
	return sealed[:cut+1], true
}

func (p *replayer) fail(err error) { p.err = &JournalError{Line: p.read, Err: err} }

// cutOff says that more should follow than there is.
func (p *replayer) cutOff() {
	if p.err == nil {
		p.read++
		p.fail(ErrJournalTruncated)
	}
}

// peek reports whether there is a line that the driver should write next.
func (p *replayer) peek() bool { return len(p.ahead) > 0 || p.fetch() }

// run repeats a journal.
func (p *replayer) run() {
	p.begin()
	for !p.over() {
		line := p.next()
		switch {
		case line == nil && len(p.ahead) == 0:
			return
		case line == nil: // delivered, and no pass
			p.cutOff()
		case line.Update != nil:
			p.offer(line.Update)
		case line.Due != nil && p.later(line.Due.At):
			return
		case line.Due != nil:
			p.fed = true
			p.report.Driver.TriggerIfDue(line.Due.At)
			p.settle()
		case line.Deliver != nil:
			p.report.Driver.Deliver(line.Deliver.observation())
		case line.Pass != nil && p.later(line.Pass.At):
			return
		case line.Pass != nil:
			p.pass(line.Pass)
		default:
			p.fail(fmt.Errorf("%w: this line can only stand within a pass", ErrJournalCorrupt))
		}
	}
}

// later reports whether a moment is one that is not repeated.
func (p *replayer) later(at time.Time) bool {
	return !p.options.Until.IsZero() && at.After(p.options.Until)
}

// begin makes the driver from the first line.
func (p *replayer) begin() {
	line := p.next()
	switch {
	case line == nil:
		p.cutOff()
		return
	case line.Journal == nil:
		p.fail(fmt.Errorf("%w: it does not begin with its schema", ErrJournalCorrupt))
		return
	case line.Journal.Schema != JournalSchema:
		p.fail(fmt.Errorf("%w: schema %d, this version reads %d", ErrJournalSchema, line.Journal.Schema, JournalSchema))
		return
	}
	c := &line.Journal.Config
	shape, err := readShape(line.Journal.Shape)
	if err == nil {
		var d *ClusterDriver
		d, err = NewClusterDriver(shape, Config{Retry: c.Retry, GroupRetry: c.GroupRetry, MaxInFlight: c.MaxInFlight,
			MaxNodes: c.MaxNodes, FirstAttempt: c.FirstAttempt, OnEvent: p.options.OnEvent})
		p.report.Driver = d
	}
	if err != nil {
		p.fail(fmt.Errorf("%w: %w", ErrJournalCorrupt, err))
		return
	}
	p.report.Driver.journal = newJournal(p, p.report.Driver, shape)
}

func readShape(text []byte) (shape ClusterShape, err error) {
	err = readExact(text, &shape)
	return shape, err
}

func (p *replayer) offer(o *journalOffer) {
	d := p.report.Driver
	switch {
	case o.Drain:
		_ = d.Drain() // what it answers is in the line that is compared
	case o.Shape == nil: // refused; there is nothing to offer
		d.in.Lock()
		d.journal.offer(&journalOffer{Faults: o.Faults}, errors.New(o.Refused))
		d.in.Unlock()
	default:
		shape, err := readShape(o.Shape)
		if err != nil {
			p.fail(fmt.Errorf("%w: %w", ErrJournalCorrupt, err))
			return
		}
		_ = d.offer(shape, o.Faults) // likewise
	}
	p.settle()
}

// settle has the driver write what waits for a pass, as it may have been
// written without one.
func (p *replayer) settle() {
	d := p.report.Driver
	d.in.Lock()
	d.journalIdly()
	d.in.Unlock()
}

// replayStop is the panic with which the executor of a replay ends a pass,
// because the one that is repeated panicked here, or because there is nothing
// to go on with.
type replayStop struct{}

func (p *replayer) pass(line *journalPass) {
	before, at := p.report, line.At // the line itself is gone once it is compared
	if p.report.Passes++; p.report.First.IsZero() {
		p.report.First = at
	}
	p.report.Last = at
	err := p.drive(at, line.FoldOnly, line.Paused)
	if err != nil && !p.over() { // the clock cannot express its own time
		p.fail(fmt.Errorf("%w: %w", ErrJournalCorrupt, err))
	}
	if p.over() { // within the pass
		p.report.Passes, p.report.First, p.report.Last = before.Passes, before.First, before.Last
	}
}

func (p *replayer) drive(at time.Time, foldOnly, paused bool) (err error) {
	defer func() {
		if cause := recover(); cause != nil && cause != (replayStop{}) {
			panic(cause)
		}
	}()
	d := p.report.Driver
	if foldOnly {
		return d.foldOnly(at)
	}
	if !p.fed { // nothing says when it was paused or resumed, but that this pass finds it so
		d.in.Lock()
		_, err = d.feed(at)
		d.in.Unlock()
		if err != nil {
			return err
		}
	}
	p.fed = false
	d.setPaused(paused)
	d.Trigger()
	_, err = d.drive(at, p)
	return err
}

// put implements journalSink.
func (p *replayer) put(found []byte) {
	if p.report.Difference != nil || !p.peek() {
		if !p.over() {
			p.cutOff()
		}
		return
	}
	expected := p.ahead[0]
	if len(p.ahead) > 1 {
		p.ahead = p.ahead[1:]
	} else {
		p.ahead = p.ahead[:0] // its room is used again
	}
	if !bytes.Equal(expected, found) {
		p.report.Difference = &ReplayDifference{Line: p.report.Lines + 1, Expected: string(expected), Found: string(found)}
		return
	}
	p.report.Lines++
	if isInput(expected) {
		p.report.Inputs++
	}
}

func (p *replayer) flush()       {}
func (p *replayer) fault() error { return nil }

// answer returns the line that answers the driver's question, if is says that
// it does, and stops the pass if there is none.
func (p *replayer) answer(is func(*journalLine) bool) *journalLine {
	if p.over() {
		panic(replayStop{})
	}
	if p.peek() {
		if line := p.parse(p.ahead[0]); line != nil && is(line) {
			return line
		}
	}
	panic(replayStop{})
}

// Submit implements [EffectExecutor].
func (p *replayer) Submit(e Effect) (bool, error) {
	s := p.answer(func(l *journalLine) bool {
		return l.Submit != nil && l.Submit.Operation == e.Operation && !l.Submit.Broke
	}).Submit
	if s.Error == nil {
		return s.Queued, nil
	}
	return s.Queued, RetryAfter(errors.New(*s.Error), s.RetryAfter)
}

// Expire implements [EffectExecutor].
func (p *replayer) Expire(id OperationID) Completion {
	x := p.answer(func(l *journalLine) bool {
		return l.Expire != nil && l.Expire.Operation == id && !l.Expire.Broke
	}).Expire
	delivery := journalDelivery{Observation: Observation{Completion: x.Answer}, Numbers: x.Numbers}
	return delivery.observation().Completion
}

// Retire implements [EffectExecutor].
func (p *replayer) Retire(attempt NodeAttemptID) {
	p.answer(func(l *journalLine) bool {
		return l.Retire != nil && l.Retire.Attempt == attempt && !l.Retire.Broke
	})
}

// Running implements [EffectExecutor]. What runs is not in a journal.
func (p *replayer) Running() []RunningCall { return nil }
