package trace

import (
	"slices"
	"strings"
	"time"

	"pgregory.net/rapid"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// Options narrow what is drawn. The zero value draws everything.
type Options struct {
	// Chapters is how many times up to 12 steps, 5 on the average, a trace
	// has. 0 means DefaultChapters, negative draws some: a trace then has up to
	// MaxSteps steps.
	Chapters int
	// Orders are the orders to draw from; nil means all.
	Orders []Order
	// AutoDrive draws no trace that is driven by hand.
	AutoDrive bool
	// Calm draws no trouble of any kind: wishes and time alone.
	Calm bool
	// Faults names the kinds of trouble that a provider makes in every trace,
	// and none makes any other; nil draws some.
	Faults []string
	// Stream draws few slots, one wish, and much of what a bootstrap and the
	// calls about it can do.
	Stream bool
	// Harmless draws trouble that may hold an attempt up and never ends one,
	// and lets each wish be fulfilled before the next one: whatever happens,
	// the provider has the same effects as without.
	Harmless bool
	// Aims are the cells that Aim steps go for; nil: there are none.
	Aims []Cell
	// FoldOnly is Config.FoldOnly of some traces; nil: of none.
	FoldOnly func(*provisioning.ClusterDriver, time.Time) error
	// FoldEach is Config.FoldEach of all of them.
	FoldEach func(*provisioning.ClusterDriver, time.Time, int, func(*provisioning.ClusterState) error) error
	// MaxInFlight is the largest cap to draw; 0 means 3, negative none at all.
	MaxInFlight int
}

// DefaultChapters keeps a trace short enough to be read.
const DefaultChapters = 4

// MaxSteps is the most steps that a trace has.
const MaxSteps = 200

// The names of the groups are such that one is the beginning of another, and
// that the slot w-1 and the group w-1 are two things.
var groupNames = []provisioning.NodeGroupID{"w", "w-1", "x"}

const maxCount = 4

// Slots are all slots that a trace can wish for, in slot order.
var Slots = func() []provisioning.LogicalNodeID {
	var slots []provisioning.LogicalNodeID
	for _, group := range groupNames {
		for index := range maxCount {
			slots = append(slots, provisioning.NewLogicalNodeID(group, index))
		}
	}
	return slots
}()

var operations = []provisioning.OperationKind{provisioning.CreateLease, provisioning.LookupEndpoint, provisioning.StartBootstrap,
	provisioning.BootstrapConvergenceObserved, provisioning.CancelBootstrap, provisioning.DestroyLease}

// durations are those of faults. The operation timeout is 30 s or 120 s, so
// that some outlast it and some do not.
var durations = []time.Duration{time.Nanosecond, 5 * time.Second, 29 * time.Second, 40 * time.Second, 180 * time.Second, 400 * time.Second}

// maxFault is the longest time for which a fault goes on by itself.
const maxFault = 10 * time.Minute

// faults are the kinds of trouble a provider makes. A trace draws first which
// of them it knows at all: with all of them in every trace most would look
// alike, and few would hold many of the same.
var faults = []struct {
	name     string
	outcomes func(t *rapid.T) []fakebackend.Outcome
}{
	{"refusals", func(t *rapid.T) []fakebackend.Outcome {
		return []fakebackend.Outcome{fakebackend.Definite(), fakebackend.Capacity(), fakebackend.Error(), fakebackend.RetryAfter(drawDuration(t))}
	}},
	{"lost answers", func(*rapid.T) []fakebackend.Outcome {
		return []fakebackend.Outcome{fakebackend.Ambiguous(), fakebackend.DoneAmbiguous(), fakebackend.DoneError()}
	}},
	{"hangs", func(*rapid.T) []fakebackend.Outcome {
		return []fakebackend.Outcome{fakebackend.Hang(), fakebackend.DoneHang()}
	}},
	{"slowness", func(t *rapid.T) []fakebackend.Outcome {
		return []fakebackend.Outcome{fakebackend.Slow(drawDuration(t)), fakebackend.DoneSlow(drawDuration(t))}
	}},
	{"late effects", func(t *rapid.T) []fakebackend.Outcome {
		return []fakebackend.Outcome{fakebackend.Late(drawDuration(t))}
	}},
	{"panics", func(*rapid.T) []fakebackend.Outcome {
		return []fakebackend.Outcome{fakebackend.Panic(), fakebackend.DonePanic()}
	}},
	{"losses", func(t *rapid.T) []fakebackend.Outcome {
		d := rapid.SampledFrom([]time.Duration{0, 5 * time.Second, time.Minute, maxFault}).Draw(t, "lives for")
		return []fakebackend.Outcome{fakebackend.Lost(), fakebackend.Dead(), fakebackend.Vanish(d), fakebackend.SpotLoss(d)}
	}},
	{"refused submissions", func(*rapid.T) []fakebackend.Outcome {
		return []fakebackend.Outcome{fakebackend.Refuse()}
	}},
	{"slow endpoints", func(*rapid.T) []fakebackend.Outcome {
		return []fakebackend.Outcome{fakebackend.OKNoEndpoint(), fakebackend.NotReady()}
	}},
}

func drawDuration(t *rapid.T) time.Duration { return rapid.SampledFrom(durations).Draw(t, "duration") }

// stepGroups are the kinds of trouble beside those of the provider.
var stepGroups = []struct {
	name     string
	kinds    []Kind
	harmless bool
}{
	{"events", []Kind{Event, Event, Event, Event, Event}, true}, // of which only some are drawn: see drawEvent
	{"old news", []Kind{Redeliver}, true},
	{"lost reports", []Kind{LoseReports}, false},
	{"silent removals", []Kind{Remove}, false},
	{"clock trouble", []Kind{Back, Leap}, true},
	{"wrong updates", []Kind{Refused, Rewish}, true},
	{"updates during a pass", []Kind{WishDuring}, false},
	{"broken passes", []Kind{BreakPass}, true},
	{"needless passes", []Kind{Trigger}, true},
	{"pauses", []Kind{Pause, Resume, Resume}, true},
	{"replacements", []Kind{Replace}, false},
}

// harmless reports whether an outcome can end no attempt and buys no second
// machine.
func (c Config) harmless(operation provisioning.OperationKind, o fakebackend.Outcome) bool {
	word, _, _ := strings.Cut(o.String(), "=")
	switch word {
	case "lost", "dead", "vanish", "spot-loss":
		return false
	case "definite", "capacity", "retry-after", "error", "done-error": // a definite no to these ends the attempt
		return operation != provisioning.StartBootstrap && operation != provisioning.BootstrapConvergenceObserved
	case "late":
		return operation != provisioning.CreateLease || c.Class != fakebackend.Label
	}
	return true
}

// Draw draws a trace.
func Draw(t *rapid.T, o Options) Trace {
	return rapid.Custom(func(t *rapid.T) Trace { return drawTrace(t, o) }).Draw(t, "trace")
}

// palette is what a trace may use. It is drawn first: a trace in which
// everything may happen has little of each.
type palette struct {
	groups   []provisioning.NodeGroupID
	count    int // the largest of a group
	kinds    []Kind
	outcomes []int // of faults
	// operations are those that can have a fault.
	operations []provisioning.OperationKind
	harmless   bool
	aims       []Cell
	config     *Config
}

func drawTrace(t *rapid.T, o Options) Trace {
	tr := Trace{Config: drawConfig(t, o)}
	p := palette{kinds: []Kind{Wish, Due, Due, Due, Through, Through}, harmless: o.Harmless, aims: o.Aims, config: &tr.Config}
	p.groups = groupNames[:rapid.IntRange(1, len(groupNames)).Draw(t, "groups")]
	p.count = rapid.IntRange(1, maxCount).Draw(t, "largest count")
	p.operations = operations
	if o.Stream {
		tr.Config.ManualBootstrap = true
		p.groups, p.count = groupNames[:1], min(p.count, 2)
		p.operations = operations[2:] // start and beyond
		p.kinds = []Kind{Event, Event, Event, Event, Due, Through}
	}
	if !o.Calm {
		for i, f := range faults {
			if slices.Contains(o.Faults, f.name) || o.Faults == nil && rapid.Bool().Draw(t, f.name) {
				p.outcomes = append(p.outcomes, i)
			}
		}
		for _, g := range stepGroups {
			if (g.harmless || !o.Harmless) && rapid.Bool().Draw(t, g.name) {
				p.kinds = append(p.kinds, g.kinds...)
			}
		}
	}
	if o.Aims != nil && !o.Harmless && tr.Config.Order != AtOnce && rapid.Bool().Draw(t, "aims") {
		p.kinds = append(p.kinds, slices.Repeat([]Kind{Aim}, 10)...)
	}
	if tr.Config.ManualBootstrap {
		p.kinds = append(p.kinds, Event, Event, Event)
	}
	if tr.Config.ManualDrive {
		p.kinds = append(p.kinds, Work, Pass, Pass, Pass, Drive)
	}
	tr.First = p.drawGroups(t)
	if o.Stream {
		tr.First = []Group{{ID: p.groups[0], Count: p.count, Image: "a"}}
	}
	if p.outcomes != nil { // some trouble lies in wait from the start
		script := rapid.Custom(func(t *rapid.T) Step { return p.drawStep(t, []Kind{Script}) })
		tr.Steps = rapid.SliceOfN(script, 0, 12).Draw(t, "scripts")
		p.kinds = append(p.kinds, Script, Script, Script, Script, Release)
	}
	chapters := o.Chapters
	switch {
	case chapters == 0:
		chapters = DefaultChapters
	case chapters < 0: // most traces short, for there are then more of them, and some as long as may be
		chapters = rapid.SampledFrom([]int{DefaultChapters, DefaultChapters, 12, 60}).Draw(t, "chapters")
	}
	step := rapid.Custom(func(t *rapid.T) Step { return p.drawStep(t, p.kinds) })
	for range chapters {
		tr.Steps = append(tr.Steps, rapid.SliceOfN(step, 0, 12).Draw(t, "steps")...)
	}
	if p.harmless {
		tr.Steps = p.settled(tr.Steps)
	}
	tr.Steps = tr.Steps[:min(len(tr.Steps), MaxSteps)]
	if !tr.Config.limited() {
		// A report that is lost is made up for by the stage deadline alone
		// (R15). Who sets none has to be told everything.
		tr.Steps = slices.DeleteFunc(tr.Steps, func(s Step) bool { return s.Kind == LoseReports })
	}
	return tr
}

// settled puts the fulfilment of each wish before the next one, and leaves out
// what may do harm.
func (p *palette) settled(steps []Step) []Step {
	var all []Step
	for _, s := range steps {
		switch {
		case s.Kind == Wish:
			all = append(all, Step{Kind: Settle})
		case (s.Kind == Script || s.Kind == Release) && !p.config.harmless(s.Operation, s.Outcome):
			continue
		}
		all = append(all, s)
	}
	return all
}

// limited reports whether a silent bootstrap ends by itself.
func (c Config) limited() bool {
	for _, p := range c.GroupRetry {
		if p.BootstrapTimeout < 0 {
			return false
		}
	}
	return c.Retry.BootstrapTimeout >= 0
}

func drawConfig(t *rapid.T, o Options) Config {
	c := Config{
		Class:        rapid.SampledFrom([]fakebackend.Class{fakebackend.Token, fakebackend.Name, fakebackend.Label}).Draw(t, "class"),
		Lag:          rapid.SampledFrom([]time.Duration{0, 5 * time.Second, 45 * time.Second}).Draw(t, "lag"),
		Settle:       rapid.SampledFrom([]time.Duration{0, 20 * time.Second, 200 * time.Second}).Draw(t, "settle"),
		Retry:        drawPolicy(t),
		FirstAttempt: rapid.SampledFrom([]provisioning.NodeAttemptID{0, 1, 1000}).Draw(t, "first attempt"),
		Seed:         rapid.Uint64Range(0, 1<<16).Draw(t, "seed"),
	}
	if rapid.Bool().Draw(t, "override") {
		c.GroupRetry = map[provisioning.NodeGroupID]provisioning.RetryPolicy{"w-1": drawPolicy(t)}
	}
	c.ManualBootstrap = rapid.Bool().Draw(t, "manual bootstrap")
	if !c.ManualBootstrap {
		c.JoinAfter = rapid.SampledFrom([]time.Duration{0, 7 * time.Second, 20 * time.Second}).Draw(t, "join after")
	}
	orders := o.Orders
	if orders == nil {
		orders = []Order{OldestFirst, NewestFirst, AnyOrder, AtOnce}
	}
	c.Order = rapid.SampledFrom(orders).Draw(t, "order")
	if most := o.MaxInFlight; most >= 0 {
		if most == 0 {
			most = 3
		}
		c.MaxInFlight = rapid.IntRange(0, most).Draw(t, "max in flight")
	}
	if !o.AutoDrive {
		c.ManualDrive = rapid.Bool().Draw(t, "manual drive")
	}
	c.FoldEach = o.FoldEach
	if o.FoldOnly != nil && rapid.Bool().Draw(t, "fold alone") {
		c.FoldOnly = o.FoldOnly
	}
	if o.Harmless { // else to be held up for long enough ends an attempt
		c.Retry.EndpointTimeout, c.Retry.BootstrapTimeout = -1, -1
		for group, policy := range c.GroupRetry {
			policy.EndpointTimeout, policy.BootstrapTimeout = -1, -1
			c.GroupRetry[group] = policy
		}
	}
	return c
}

func drawPolicy(t *rapid.T) provisioning.RetryPolicy {
	pick := func(label string, of ...time.Duration) time.Duration { return rapid.SampledFrom(of).Draw(t, label) }
	return provisioning.RetryPolicy{
		InitialDelay:          pick("initial", time.Second, 250*time.Millisecond, 5*time.Second),
		MaxDelay:              pick("max", 60*time.Second, 8*time.Second),
		Jitter:                rapid.SampledFrom([]float64{0, 0.5, 0.9}).Draw(t, "jitter"),
		OperationTimeout:      pick("timeout", 30*time.Second, 120*time.Second),
		EndpointProbeInterval: pick("probe", 5*time.Second, time.Second),
		EndpointTimeout:       pick("endpoint timeout", 10*time.Minute, -1, 30*time.Second),
		BootstrapTimeout:      pick("bootstrap timeout", 20*time.Minute, -1, 45*time.Second),
		StableAfter:           pick("stable after", 10*time.Minute, time.Second),
		CancelLimit:           rapid.SampledFrom([]int{5, 1, -1}).Draw(t, "cancel limit"),
		MaxRetryAfter:         pick("max retry after", time.Hour, 50*time.Second),
	}
}

// drawGroups draws a wish.
func (p *palette) drawGroups(t *rapid.T) []Group {
	var groups []Group
	for _, id := range p.groups {
		if rapid.IntRange(0, 4).Draw(t, "has "+string(id)) == 0 {
			continue
		}
		groups = append(groups, Group{ID: id, Count: rapid.IntRange(0, p.count).Draw(t, "count"),
			Image: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "image")})
	}
	if len(groups) > 1 && rapid.Bool().Draw(t, "the other way round") {
		slices.Reverse(groups)
	}
	return groups
}

func (p *palette) drawStep(t *rapid.T, kinds []Kind) Step {
	s := Step{Kind: rapid.SampledFrom(kinds).Draw(t, "kind")}
	switch s.Kind {
	case Wish, WishDuring:
		s.Groups = p.drawGroups(t)
	case Refused:
		s.Groups = p.drawGroups(t)
		s.Refusal = Refusal(rapid.IntRange(0, int(refusals)-1).Draw(t, "refusal"))
	case Script, Release:
		s.Slot = p.drawSlot(t)
		s.Operation, s.Outcome = p.drawCall(t, s.Kind)
		s.N = rapid.IntRange(1, 4).Draw(t, "times")
	case Remove, Replace:
		s.Slot = p.drawSlot(t)
	case Event:
		s.Slot = p.drawSlot(t)
		s.Event = p.drawEvent(t)
		s.Age = rapid.SampledFrom([]int{0, 0, 0, 0, 1, 2, -1}).Draw(t, "age")
		s.DeadSession = rapid.IntRange(0, 4).Draw(t, "dead session") == 4
	case Redeliver:
		s.Slot = p.drawSlot(t)
		s.N = rapid.IntRange(1, 30).Draw(t, "how many")
	case Aim:
		s.Cell = p.drawCell(t)
		s.N = rapid.IntRange(0, 1).Draw(t, "way")
	case LoseReports:
		s.Slot = p.drawSlot(t)
		s.N = rapid.IntRange(1, 3).Draw(t, "how many")
	case Due:
		s.D = time.Duration(rapid.SampledFrom([]int{0, 0, 1, -1}).Draw(t, "nanoseconds beyond"))
	case Leap:
		s.D = rapid.SampledFrom([]time.Duration{time.Nanosecond, time.Second, 31 * time.Second, 121 * time.Second, time.Hour, 25 * time.Hour}).Draw(t, "leap")
	case Through:
		s.D = rapid.SampledFrom([]time.Duration{time.Second, 10 * time.Second, time.Minute, 15 * time.Minute}).Draw(t, "time")
	case Back:
		s.D = rapid.SampledFrom([]time.Duration{time.Nanosecond, time.Second, time.Minute, 24 * time.Hour}).Draw(t, "back")
	case BreakPass:
		s.N = rapid.IntRange(1, 4).Draw(t, "call")
	case Work:
		s.N = rapid.IntRange(1, 3).Draw(t, "pieces")
	}
	return s
}

// drawCell draws the sum of two draws. Of many values rapid takes the first ones
// far more often, and here all are to have their turn.
func (p *palette) drawCell(t *rapid.T) Cell {
	n := len(p.aims)
	draw := rapid.IntRange(0, n-1)
	return p.aims[(draw.Draw(t, "cell")+37*draw.Draw(t, "cell"))%n]
}

func (p *palette) drawSlot(t *rapid.T) provisioning.LogicalNodeID {
	return provisioning.NewLogicalNodeID(rapid.SampledFrom(p.groups).Draw(t, "group"), rapid.IntRange(0, p.count-1).Draw(t, "index"))
}

// drawCall draws an operation and one of the outcomes that this trace knows. An
// outcome that fits one operation only has that one.
func (p *palette) drawCall(t *rapid.T, kind Kind) (provisioning.OperationKind, fakebackend.Outcome) {
	operation := rapid.SampledFrom(p.operations).Draw(t, "operation")
	o := rapid.SampledFrom(faults[rapid.SampledFrom(p.outcomes).Draw(t, "fault")].outcomes(t)).Draw(t, "outcome")
	if kind == Release && !Ends(o) {
		return operation, fakebackend.OK()
	}
	for _, fitting := range operations {
		if o.Fits(operation) != nil && o.Fits(fitting) == nil {
			operation = fitting
		}
	}
	return operation, o
}

// Ends reports whether a hanging call can end in that outcome.
func Ends(o fakebackend.Outcome) bool {
	switch o {
	case fakebackend.Hang(), fakebackend.DoneHang(), fakebackend.Refuse():
		return false
	}
	for _, d := range durations {
		if o == fakebackend.Slow(d) || o == fakebackend.DoneSlow(d) {
			return false
		}
	}
	return true
}

// The stages that a bootstrap reports: on its way, and in the end.
var (
	progressStages = []provisioning.BootstrapStage{provisioning.BootstrapStageCreated, provisioning.BootstrapStageSSHConnecting,
		provisioning.BootstrapStageSSHReady, provisioning.BootstrapStageStdoutStreaming, provisioning.BootstrapStageBootChecking,
		provisioning.BootstrapStageSwactorStarting, provisioning.BootstrapStageWaitingForSwactorJoin}
	endStages = []provisioning.BootstrapStage{provisioning.BootstrapStageConverged, provisioning.BootstrapStageClosed,
		provisioning.BootstrapStageCancelled, provisioning.BootstrapStageSSHConnectFailed, provisioning.BootstrapStageBootCheckFailed,
		provisioning.BootstrapStageStartFailed, provisioning.BootstrapStageSwactorJoinFailed, provisioning.BootstrapStageStreamError}
)

func (p *palette) drawEvent(t *rapid.T) EventWord {
	words := []string{"join", "join", "join", "stage", "end", "end", "lost", "another", "close", "failure"}
	if p.harmless {
		words = []string{"join", "stage"}
	}
	progress := func(stages []provisioning.BootstrapStage) EventWord {
		return EventWord{Kind: provisioning.BootstrapProgress, Stage: rapid.SampledFrom(stages).Draw(t, "stage")}
	}
	switch rapid.SampledFrom(words).Draw(t, "event") {
	case "join":
		return EventWord{Kind: provisioning.SwactorJoined}
	case "another":
		return EventWord{Kind: provisioning.SwactorJoined, Agent: "somebody-else"}
	case "close":
		return EventWord{Kind: provisioning.BootstrapClosed}
	case "failure":
		return EventWord{Kind: provisioning.BootstrapFailed}
	case "lost":
		return EventWord{Kind: provisioning.NodeLost}
	case "end":
		return progress(endStages)
	}
	return progress(progressStages)
}
