package histories

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/internal/verify"
)

// The model of an executor: an operation is a register that is written once. The
// first outcome, be it the answer of the call or what Expire says, is what every
// later Submit, Expire and delivery of that operation shows; another effect under
// its name is refused; the answer that comes later goes nowhere.

const (
	exAttempts   = 2
	exSequences  = 3 // of an attempt; far fewer than the results that are kept
	exPerHistory = 12
	notes        = 100 // and on are clients of what is only seen
)

// exKind is what was seen.
type exKind int

const (
	exSubmit    exKind = iota
	exExpire           //
	exRetire           //
	exBegins           // the backend is called
	exAnswers          // the backend answers
	exDelivered        // an outcome is delivered
)

// exInput is of one attempt.
type exInput struct {
	kind     exKind
	attempt  int
	sequence int
	variant  int    // of what is submitted
	value    string // answered or delivered
}

// exOutput is what Submit or Expire said.
type exOutput struct {
	refusal string // of Submit
	value   string // of Expire
}

// exRegister is one operation of the model.
type exRegister struct {
	variant int // 0: never submitted
	begun   bool
	value   string // empty: not written
}

// exLedger is the model of one attempt.
type exLedger struct {
	registers [exSequences + 1]exRegister
	highest   int
	retired   bool
}

const (
	exConflict = "conflict"
	exOver     = "over"
	exUnknown  = "Ambiguous the executor does not know the operation"
	exNoAnswer = "Ambiguous no answer before the deadline"
	exTooLate  = "NotStarted an earlier call of the attempt did not return before the deadline"
)

var exModel = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		parts := make([][]porcupine.Operation, exAttempts)
		for _, o := range history {
			attempt := o.Input.(exInput).attempt
			parts[attempt] = append(parts[attempt], o)
		}
		return parts
	},
	Init: func() any { return exLedger{} },
	Step: func(state, input, output any) (bool, any) {
		l, in := state.(exLedger), input.(exInput)
		r := &l.registers[in.sequence]
		switch in.kind {
		case exSubmit:
			switch refusal := output.(exOutput).refusal; {
			case l.retired:
				return refusal == exOver, l
			case r.variant != 0:
				return refusal == "" && r.variant == in.variant || refusal == exConflict && r.variant != in.variant, l
			case in.sequence < l.highest:
				return refusal == exOver, l
			default:
				r.variant, l.highest = in.variant, in.sequence
				return refusal == "", l
			}
		case exExpire:
			said := output.(exOutput).value
			switch {
			case said == exUnknown:
				return r.variant == 0 || l.retired, l
			case r.variant == 0:
				return false, l
			case r.value != "":
				return said == r.value, l
			}
			r.value = said
			return said == exNoAnswer || said == exTooLate && !r.begun, l
		case exRetire:
			l.retired = true
			return true, l
		case exBegins:
			may := r.variant != 0 && !r.begun && r.value != exTooLate
			r.begun = true
			return may, l
		case exAnswers:
			if r.value == "" {
				r.value = in.value
			}
			return r.begun, l
		default:
			return r.value == in.value, l
		}
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
}

// exHistory is one executor and what was seen of it.
type exHistory struct {
	start    time.Time
	executor provisioning.EffectExecutor
	random   *rand.Rand // of the backend; guarded by mu

	mu       sync.Mutex
	seen     []porcupine.Operation // by the backend and by Deliver
	answers  map[string]int        // where in seen, by their value
	running  [exAttempts]int
	together bool // two calls of one attempt ran at once
	over     bool // what is seen now is not written down
}

func (h *exHistory) now() int64 { return time.Since(h.start).Nanoseconds() }

// see writes down what happens at one moment, or begins then. The caller holds
// mu.
func (h *exHistory) see(in exInput) {
	if !h.over {
		at := h.now()
		h.seen = append(h.seen, porcupine.Operation{ClientId: len(h.seen) + notes, Input: in, Call: at, Output: exOutput{}, Return: at})
	}
}

func exValue(c provisioning.Completion) string {
	return fmt.Sprintf("%v %s%s", c.Class, c.Message, c.Lease)
}

func exID(id provisioning.OperationID) (attempt, sequence int) {
	return int(id.Attempt) - 1, int(id.Sequence)
}

func (h *exHistory) deliver(o provisioning.Observation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	attempt, sequence := exID(o.Completion.Operation)
	value := exValue(o.Completion)
	h.see(exInput{kind: exDelivered, attempt: attempt, sequence: sequence, value: value})
	if i, known := h.answers[value]; known && !h.over {
		h.seen[i].Return = h.now() // it counted by now
		delete(h.answers, value)
	}
}

// exBackend answers every create with something that it never answered before,
// at once, after a while, or when it is told to stop.
type exBackend struct {
	provisioning.EffectBackend
	h *exHistory
}

func (b exBackend) CreateLease(ctx context.Context, r provisioning.CreateLeaseRequest) (result provisioning.CreateLeaseResult, err error) {
	h := b.h
	attempt, sequence := exID(r.Operation)
	h.mu.Lock()
	h.see(exInput{kind: exBegins, attempt: attempt, sequence: sequence})
	h.running[attempt]++
	h.together = h.together || h.running[attempt] > 1
	how := h.random.IntN(8)
	h.mu.Unlock()

	switch how {
	case 0, 1, 2:
		<-ctx.Done()
	case 3, 4, 5:
		for range how {
			runtime.Gosched()
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.running[attempt]--
	value := fmt.Sprintf("answer %d", len(h.seen))
	answer := provisioning.Completion{Class: provisioning.ClassNone, Lease: provisioning.ProviderLeaseID(value)}
	result.Lease = answer.Lease
	if how%2 == 0 {
		err = provisioning.Definite(errors.New(value))
		answer = provisioning.Completion{Class: provisioning.ClassDefinite, Message: err.Error()}
	}
	if !h.over {
		h.see(exInput{kind: exAnswers, attempt: attempt, sequence: sequence, value: exValue(answer)})
		last := len(h.seen) - 1
		h.seen[last].Return = 1 << 60 // until it is delivered nobody knows when it counted, or whether
		h.answers[exValue(answer)] = last
	}
	return result, err
}

// client does what its random numbers say and writes it down.
func (h *exHistory) client(id int, random *rand.Rand) (seen []porcupine.Operation) {
	spec := provisioning.LogicalNodeSpec{}
	for range exPerHistory / 3 {
		in := exInput{attempt: random.IntN(exAttempts), sequence: 1 + random.IntN(exSequences), variant: 1}
		operation := provisioning.OperationID{Attempt: provisioning.NodeAttemptID(in.attempt + 1), Sequence: uint64(in.sequence)}
		var out exOutput
		choice, yields := random.IntN(20), random.IntN(4)
		if random.IntN(6) == 0 {
			in.variant = 2
		}
		for range yields {
			runtime.Gosched()
		}
		call := h.now()
		switch {
		case choice == 0:
			in.kind = exRetire
			h.executor.Retire(operation.Attempt)
		case choice < 7:
			in.kind = exExpire
			out.value = exValue(h.executor.Expire(operation))
		default:
			e := provisioning.NewEffect(operation, provisioning.CreateLease, provisioning.ExternalKey{Run: "r", Node: "w-0", Attempt: operation.Attempt}, spec)
			e.CreatesSent = uint32(in.variant)
			_, err := h.executor.Submit(e)
			switch {
			case errors.Is(err, provisioning.ErrOperationConflict):
				out.refusal = exConflict
			case errors.Is(err, provisioning.ErrOperationRetired):
				out.refusal = exOver
			case err != nil:
				out.refusal = err.Error()
			}
		}
		seen = append(seen, porcupine.Operation{ClientId: id, Input: in, Call: call, Output: out, Return: h.now()})
	}
	return seen
}

// exPlay makes a history. wrap may put something wrong in the way.
func exPlay(t *testing.T, seed uint64, wrap func(provisioning.EffectExecutor) provisioning.EffectExecutor) []porcupine.Operation {
	h := &exHistory{start: time.Now(), answers: make(map[string]int), random: rand.New(rand.NewPCG(seed, 0))}
	executor, err := provisioning.NewExecutor(exBackend{h: h}, provisioning.ExecutorConfig{Deliver: h.deliver})
	require.NoError(t, err)
	h.executor = wrap(executor)
	var wait sync.WaitGroup
	var seen [3][]porcupine.Operation
	for i := range seen {
		wait.Go(func() { seen[i] = h.client(i, rand.New(rand.NewPCG(seed, uint64(i+1)))) })
	}
	wait.Wait()
	h.mu.Lock()
	h.over = true
	history := h.seen
	h.mu.Unlock()
	require.NoError(t, executor.Close(t.Context()))
	require.False(t, h.together, "seed %d: two calls of one attempt ran at once", seed)
	for _, of := range seen {
		history = append(history, of...)
	}
	return history
}

// histories is how many are made in this run.
func histories() int {
	if verify.Full() {
		return 10_000
	}
	return 300
}

// tell writes a history down, in the order in which it was begun.
func tell(model porcupine.Model, history []porcupine.Operation) (text string) {
	slices.SortFunc(history, func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) })
	for _, o := range history {
		text += fmt.Sprintf("%9d to %9d, client %d: %s\n", o.Call, o.Return, o.ClientId, model.DescribeOperation(o.Input, o.Output))
	}
	return text
}

// concurrent reports whether two clients act at the same time; a history in which
// none do has one order by itself.
func concurrent(history []porcupine.Operation) bool {
	for i, a := range history {
		for _, b := range history[:i] {
			clients := a.ClientId < notes && b.ClientId < notes && a.ClientId != b.ClientId
			if clients && a.Call < b.Return && b.Call < a.Return {
				return true
			}
		}
	}
	return false
}

// TestExecutorIsARegisterWrittenOnce: every history of an executor is one of
// registers that are written once.
func TestExecutorIsARegisterWrittenOnce(t *testing.T) {
	var played, beside, conflicts, expired, replayed, late, delivered int
	for i := range histories() {
		seed := verify.Seed() + uint64(i)
		history := exPlay(t, seed, func(x provisioning.EffectExecutor) provisioning.EffectExecutor { return x })
		if !porcupine.CheckOperations(exModel, history) {
			t.Fatalf("seed %d: there is no order for\n%s", seed, tell(exModel, history))
		}
		played++
		if concurrent(history) {
			beside++
		}
		deliveries := make(map[string]int)
		for _, o := range history {
			in, out := o.Input.(exInput), o.Output.(exOutput)
			switch {
			case out.refusal == exConflict:
				conflicts++
			case out.value == exNoAnswer || out.value == exTooLate:
				expired++
			case in.kind == exAnswers && o.Return == 1<<60:
				late++
			case in.kind == exDelivered:
				delivered++
				if deliveries[in.value]++; deliveries[in.value] == 2 {
					replayed++
				}
			}
		}
	}
	verify.AtLeast(t, "histories of executors", played, verify.Target(10_000, 300))
	verify.AtLeast(t, "of which clients act at the same time", beside, verify.Target(1000, 30))
	verify.AtLeast(t, "conflicts in them", conflicts, verify.Target(1000, 30))
	verify.AtLeast(t, "operations that expired", expired, verify.Target(1000, 30))
	verify.AtLeast(t, "outcomes delivered", delivered, verify.Target(10_000, 300))
	verify.AtLeast(t, "outcomes delivered again", replayed, verify.Target(500, 15))
	verify.AtLeast(t, "answers that came too late, or last", late, verify.Target(500, 15))
}

// exForgetful is an executor that does not look whether the answer is there when
// the time is up.
type exForgetful struct{ provisioning.EffectExecutor }

func (x exForgetful) Expire(id provisioning.OperationID) provisioning.Completion {
	c := x.EffectExecutor.Expire(id)
	if c.Class == provisioning.ClassNone {
		c = provisioning.Completion{Operation: id, Class: provisioning.ClassAmbiguous, Message: "no answer before the deadline"}
	}
	return c
}

// exLenient is an executor that takes another effect for the same.
type exLenient struct{ provisioning.EffectExecutor }

func (x exLenient) Submit(e provisioning.Effect) (bool, error) {
	queued, err := x.EffectExecutor.Submit(e)
	if errors.Is(err, provisioning.ErrOperationConflict) {
		err = nil
	}
	return queued, err
}

// TestExecutorHistoriesCanFail: what breaks the promise is found.
func TestExecutorHistoriesCanFail(t *testing.T) {
	for name, wrap := range map[string]func(provisioning.EffectExecutor) provisioning.EffectExecutor{
		"an outcome is replaced":    func(x provisioning.EffectExecutor) provisioning.EffectExecutor { return exForgetful{x} },
		"a conflict is not refused": func(x provisioning.EffectExecutor) provisioning.EffectExecutor { return exLenient{x} },
	} {
		t.Run(name, func(t *testing.T) {
			for i := range 10_000 {
				if history := exPlay(t, verify.Seed()+uint64(i), wrap); !porcupine.CheckOperations(exModel, history) {
					return
				}
			}
			t.Error("nobody notices")
		})
	}
}
