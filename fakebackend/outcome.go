package fakebackend

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/swactor/provisioning"
)

// Outcome is what becomes of one call. Its text form is what [ParseOutcome]
// reads. The zero value is OK.
type Outcome struct {
	word  word
	after time.Duration
}

type word uint8

const (
	ok word = iota
	okNoEndpoint
	notReady
	definite
	capacity
	retryAfter
	unclassified
	ambiguous
	doneAmbiguous
	doneError
	hang
	doneHang
	slow
	doneSlow
	late
	panics
	donePanics
	lost
	dead
	vanish
	spotLoss
	refuse
)

// words holds what is known of every outcome.
var words = [...]struct {
	text  string
	timed bool // it carries a duration
	// only names the one operation that the outcome makes sense for;
	// NoOperation: any.
	only provisioning.OperationKind
}{
	ok:            {text: "ok"},
	okNoEndpoint:  {text: "ok-no-endpoint", only: provisioning.CreateLease},
	notReady:      {text: "not-ready", only: provisioning.LookupEndpoint},
	definite:      {text: "definite"},
	capacity:      {text: "capacity"},
	retryAfter:    {text: "retry-after", timed: true},
	unclassified:  {text: "error"},
	ambiguous:     {text: "ambiguous"},
	doneAmbiguous: {text: "done-ambiguous"},
	doneError:     {text: "done-error"},
	hang:          {text: "hang"},
	doneHang:      {text: "done-hang"},
	slow:          {text: "slow", timed: true},
	doneSlow:      {text: "done-slow", timed: true},
	late:          {text: "late", timed: true},
	panics:        {text: "panic"},
	donePanics:    {text: "done-panic"},
	lost:          {text: "lost"},
	dead:          {text: "dead", only: provisioning.CreateLease},
	vanish:        {text: "vanish", timed: true, only: provisioning.CreateLease},
	spotLoss:      {text: "spot-loss", timed: true},
	refuse:        {text: "refuse"},
}

// OK lets the call succeed. A create answers with lease and endpoint.
func OK() Outcome { return Outcome{} }

// OKNoEndpoint lets a create succeed without saying where the machine answers.
func OKNoEndpoint() Outcome { return Outcome{word: okNoEndpoint} }

// NotReady lets a look-up answer that there is no endpoint yet.
func NotReady() Outcome { return Outcome{word: notReady} }

// Definite refuses: nothing is done. A create whose machine is there adopts it
// all the same (B1).
func Definite() Outcome { return Outcome{word: definite} }

// Capacity is Definite with the message of a provider that is sold out.
func Capacity() Outcome { return Outcome{word: capacity} }

// RetryAfter is Definite with a hint not to ask again before d has passed.
func RetryAfter(d time.Duration) Outcome { return Outcome{word: retryAfter, after: d} }

// Error answers with an error of no class; nothing is done.
func Error() Outcome { return Outcome{word: unclassified} }

// Ambiguous answers that the outcome is unknown; nothing is done.
func Ambiguous() Outcome { return Outcome{word: ambiguous} }

// DoneAmbiguous has its effect and loses the answer.
func DoneAmbiguous() Outcome { return Outcome{word: doneAmbiguous} }

// DoneError has its effect and answers with an error of no class.
func DoneError() Outcome { return Outcome{word: doneError} }

// Hang does nothing and gives no answer until [Backend.Release] says how the
// call ends. It does not look at its context: such calls exist.
func Hang() Outcome { return Outcome{word: hang} }

// DoneHang has its effect at once and then is like Hang.
func DoneHang() Outcome { return Outcome{word: doneHang} }

// Slow has its effect and answers after d, whatever its context says.
func Slow(d time.Duration) Outcome { return Outcome{word: slow, after: d} }

// DoneSlow has its effect at once and answers after d.
func DoneSlow(d time.Duration) Outcome { return Outcome{word: doneSlow, after: d} }

// Late answers Ambiguous at once and has its effect d later, unless the class
// of the provider prevents it, see [Class].
func Late(d time.Duration) Outcome { return Outcome{word: late, after: d} }

// Panic panics before anything is done.
func Panic() Outcome { return Outcome{word: panics} }

// DonePanic has its effect and panics.
func DonePanic() Outcome { return Outcome{word: donePanics} }

// Lost answers LeaseLost: the machine of the key is gone, and what was still
// to land for it will not.
func Lost() Outcome { return Outcome{word: lost} }

// Dead makes or finds a machine that is dead and still billed: LeaseLost with
// its lease (B11). It lives on until it is destroyed.
func Dead() Outcome { return Outcome{word: dead} }

// Vanish lets a create succeed; d later its machine is gone, silently.
func Vanish(d time.Duration) Outcome { return Outcome{word: vanish, after: d} }

// SpotLoss lets the call succeed; d later the machine is gone, and the
// bootstrap's sink is told if there is one by then.
func SpotLoss(d time.Duration) Outcome { return Outcome{word: spotLoss, after: d} }

// Refuse lets the executor refuse the submission, if it is wrapped by
// [Backend.Refusing]. It is no call and is not counted as one. A call that
// meets it all the same answers NotStarted.
func Refuse() Outcome { return Outcome{word: refuse} }

// Repeat returns n times the same outcome, for [Backend.Script].
func Repeat(n int, o Outcome) []Outcome { return slices.Repeat([]Outcome{o}, n) }

// String returns the text that ParseOutcome reads.
func (o Outcome) String() string {
	w := words[o.word]
	if w.timed {
		return w.text + "=" + o.after.String()
	}
	return w.text
}

// Fits returns an error if the outcome makes no sense for that operation.
func (o Outcome) Fits(kind provisioning.OperationKind) error {
	if only := words[o.word].only; only != provisioning.NoOperation && only != kind {
		return fmt.Errorf("fakebackend: outcome %v is for %v only, not for %v", o, only, kind)
	}
	return nil
}

// blocks reports whether the call waits for the test or the clock.
func (o Outcome) blocks() bool {
	return o.word == hang || o.word == doneHang || o.word == slow || o.word == doneSlow
}

// effective reports whether an answer at once comes with the effect.
func (o Outcome) effective() bool {
	switch o.word {
	case ok, okNoEndpoint, notReady, doneAmbiguous, doneError, donePanics, dead, vanish, spotLoss:
		return true
	}
	return false
}

// MaxRepeat bounds the N of "OUTCOME*N".
const MaxRepeat = 1_000_000

// ErrOutcome is what errors.Is finds in an error of [ParseOutcome].
var ErrOutcome = errors.New("fakebackend: not an outcome")

// ParseOutcome reads an outcome, with "*N" behind it N times the same:
//
//	ok ok-no-endpoint not-ready
//	definite capacity retry-after=30s error ambiguous done-ambiguous done-error
//	hang done-hang slow=40s done-slow=40s late=180s
//	panic done-panic lost dead vanish=5s spot-loss=1h refuse
//
// A duration needs its unit and is not negative.
func ParseOutcome(text string) ([]Outcome, error) {
	name, count, repeated := strings.Cut(text, "*")
	n := 1
	if repeated {
		var err error
		if n, err = strconv.Atoi(count); err != nil || n < 1 || n > MaxRepeat {
			return nil, fmt.Errorf("%w: %q: the count must be 1 to %d", ErrOutcome, text, MaxRepeat)
		}
	}
	name, duration, timed := strings.Cut(name, "=")
	for i, w := range words {
		if w.text != name {
			continue
		}
		switch {
		case w.timed && !timed:
			return nil, fmt.Errorf("%w: %q needs a duration, like %s=30s", ErrOutcome, text, name)
		case !w.timed && timed:
			return nil, fmt.Errorf("%w: %q takes no duration", ErrOutcome, text)
		}
		o := Outcome{word: word(i)}
		if timed {
			d, err := time.ParseDuration(duration)
			if err != nil || d < 0 || duration == "0" {
				return nil, fmt.Errorf("%w: %q: the duration must look like 30s", ErrOutcome, text)
			}
			o.after = d
		}
		return Repeat(n, o), nil
	}
	return nil, fmt.Errorf("%w: %q", ErrOutcome, text)
}
