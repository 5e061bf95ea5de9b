package trace

import (
	"testing"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// fuzzBytes gives out bytes as choices. Where there are none left it chooses the
// first, which is the calm one.
type fuzzBytes []byte

func (b *fuzzBytes) next() int {
	if len(*b) == 0 {
		return 0
	}
	c := (*b)[0]
	*b = (*b)[1:]
	return int(c)
}

func fuzzPick[T any](b *fuzzBytes, of ...T) T { return of[b.next()%len(of)] }

func (b *fuzzBytes) slot() provisioning.LogicalNodeID { return fuzzPick(b, Slots...) }

func (b *fuzzBytes) groups() []Group {
	var groups []Group
	for _, id := range groupNames {
		if c := b.next() % (2 * (maxCount + 1)); c > 0 {
			groups = append(groups, Group{ID: id, Count: c / 2, Image: [...]string{"a", "b"}[c%2]})
		}
	}
	return groups
}

// fuzzOutcomes are the words of the script, each that takes a time with a short
// and a long one.
var fuzzOutcomes = []string{"ok", "ok-no-endpoint", "not-ready", "definite", "capacity", "retry-after=40s", "error", "ambiguous", "done-ambiguous",
	"done-error", "hang", "done-hang", "slow=5s", "slow=40s", "done-slow=40s", "late=5s", "late=180s", "late=400s", "panic", "done-panic", "lost", "dead",
	"vanish=5s", "spot-loss=60s", "refuse"}

// call reads an operation and an outcome that fits it.
func (b *fuzzBytes) call(kind Kind) (provisioning.OperationKind, fakebackend.Outcome) {
	operation := fuzzPick(b, operations...)
	parsed, err := fakebackend.ParseOutcome(fuzzPick(b, fuzzOutcomes...))
	if err != nil {
		panic(err)
	}
	if o := parsed[0]; o.Fits(operation) == nil && (kind == Script || Ends(o)) {
		return operation, o
	}
	return operation, fakebackend.OK()
}

func (b *fuzzBytes) event() EventWord {
	kind := fuzzPick(b, provisioning.SwactorJoined, provisioning.BootstrapProgress, provisioning.BootstrapFailed, provisioning.BootstrapClosed, provisioning.NodeLost)
	e := EventWord{Kind: kind}
	switch kind {
	case provisioning.BootstrapProgress:
		e.Stage = provisioning.BootstrapStage(b.next() % (int(provisioning.BootstrapStageStreamError) + 1))
	case provisioning.SwactorJoined:
		e.Agent = fuzzPick(b, "", provisioning.SwactorID("somebody-else"))
	}
	return e
}

// step reads a step: what happens, to which slot, and how.
func (b *fuzzBytes) step() Step {
	s := Step{Kind: Kind(b.next() % int(Drive+1)), N: 1}
	switch s.Kind {
	case Wish, WishDuring:
		s.Groups = b.groups()
	case Refused:
		s.Groups, s.Refusal = b.groups(), Refusal(b.next()%int(refusals))
	case Script, Release:
		s.Slot, s.N = b.slot(), 1+b.next()%4
		s.Operation, s.Outcome = b.call(s.Kind)
	case Remove, Replace:
		s.Slot = b.slot()
	case Event:
		s.Slot, s.Event, s.Age, s.DeadSession = b.slot(), b.event(), fuzzPick(b, 0, 1, 2, -1), b.next()%4 == 3
	case Redeliver:
		s.Slot, s.N = b.slot(), 1+b.next()%30
	case LoseReports:
		s.Slot, s.N = b.slot(), 1+b.next()%3
	case Due:
		s.D = fuzzPick(b, time.Duration(0), 1, -1)
	case Leap, Through, Back:
		s.D = fuzzPick(b, time.Second, time.Nanosecond, 31*time.Second, 121*time.Second, 15*time.Minute)
	case BreakPass, Work:
		s.N = 1 + b.next()%4
	}
	return s
}

// fuzzTrace reads a world and what happens in it.
func fuzzTrace(b fuzzBytes) Trace {
	pick := func(of ...time.Duration) time.Duration { return fuzzPick(&b, of...) }
	tr := Trace{Config: Config{
		Class: fuzzPick(&b, fakebackend.Token, fakebackend.Name, fakebackend.Label), Lag: pick(0, 45*time.Second), Settle: pick(0, 200*time.Second),
		Order: Order(b.next() % len(orderNames)), MaxInFlight: b.next() % 4, ManualBootstrap: b.next()%2 == 1, ManualDrive: b.next()%2 == 1,
		JoinAfter: pick(0, 20*time.Second), FirstAttempt: fuzzPick[provisioning.NodeAttemptID](&b, 0, 1000),
		Retry: provisioning.RetryPolicy{
			InitialDelay: pick(time.Second, 5*time.Second), MaxDelay: pick(60*time.Second, 8*time.Second), Jitter: fuzzPick(&b, 0, 0.5),
			OperationTimeout: pick(30*time.Second, 120*time.Second), EndpointProbeInterval: 5 * time.Second,
			EndpointTimeout: pick(10*time.Minute, 30*time.Second), BootstrapTimeout: pick(20*time.Minute, 45*time.Second),
			StableAfter: pick(10*time.Minute, time.Second), CancelLimit: fuzzPick(&b, 5, 1, -1),
		},
	}}
	if tr.Config.ManualBootstrap {
		tr.Config.JoinAfter = 0
	}
	tr.First = b.groups()
	for len(b) > 0 && len(tr.Steps) < 60 {
		tr.Steps = append(tr.Steps, b.step())
	}
	return tr
}

// FuzzTrace: whatever the bytes say that happens, everything is true after every
// pass that must be, and once the trouble stops the cluster becomes what is
// wished for, stays it, and leaves nothing when nothing is wished for.
func FuzzTrace(f *testing.F) {
	calm := []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 2}
	f.Add(calm)
	for kind := range Drive + 1 { // each step alone, among passes of time
		f.Add(append(calm, byte(Due), 0, byte(kind), 1, 2, 3, byte(Due), 0, byte(kind), 0, 17, 1, byte(Through), 4))
	}
	f.Add([]byte{2, 1, 1, 2, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 5, 7, byte(Script), 0, 3, 0, 16, byte(Pass), byte(Work), 2, byte(Pass), byte(Event), 0, 0, 0, 0, 0,
		byte(Wish), 0, 0, 0, byte(Due), 0, byte(Pass), byte(Drive)})
	f.Fuzz(func(t *testing.T, data []byte) {
		tr := fuzzTrace(data)
		w, err := Play(tr, nil)
		if err == nil {
			err = w.Tail()
		}
		if err != nil {
			t.Fatalf("%v\n%s", err, w.Story(tr))
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
