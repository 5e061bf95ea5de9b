package scenario

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/internal/invariant"
)

func (r *runner) doExpect(words []string) error {
	if len(words) == 0 {
		return wrong("what to expect", "nothing")
	}
	about, ok := expectations[words[0]]
	if !ok {
		return r.expectSlot(words)
	}
	if about.needsDriver && r.driver == nil {
		return wrong("a shape before expect "+words[0], "none")
	}
	return about.run(r, words[1:])
}

// expectations are the words that may follow expect in the place of a slot.
var expectations = map[string]command{
	"slots":     {run: (*runner).expectSlots, needsDriver: true},
	"calls":     {run: (*runner).expectCalls},
	"gaps":      {run: (*runner).expectGaps},
	"live":      {run: (*runner).expectLive},
	"created":   {run: (*runner).expectCreated},
	"requeue":   {run: (*runner).expectRequeue, needsDriver: true},
	"converged": {run: (*runner).expectConverged, needsDriver: true},
	"observed":  {run: (*runner).expectObserved, needsDriver: true},
	"attempts":  {run: (*runner).expectAttempts, needsDriver: true},
	"progress":  {run: (*runner).expectProgress, needsDriver: true},
}

func (r *runner) expectSlots(words []string) error {
	for _, word := range words {
		if _, err := parseSlot(word); err != nil {
			return err
		}
	}
	var found []string
	for node := range r.driver.Snapshot().All() {
		found = append(found, string(node.Record.Node))
	}
	list := func(slots []string) string {
		if len(slots) == 0 {
			return "no slots"
		}
		return strings.Join(slots, " ")
	}
	if !slices.Equal(slices.Sorted(slices.Values(words)), slices.Sorted(slices.Values(found))) {
		return wrong(list(words), list(found))
	}
	return nil
}

func (r *runner) expectCalls(words []string) error {
	if len(words) < 2 {
		return wrong("a slot and counts, like w-0 create=1", quoted(strings.Join(words, " ")))
	}
	slot, err := parseSlot(words[0])
	if err != nil {
		return err
	}
	for _, word := range words[1:] {
		key, value, err := parseAssignment(word)
		if err != nil {
			return err
		}
		kind, err := parseOperation(key)
		if err != nil {
			return err
		}
		want, err := parseNumber(value)
		if err != nil {
			return err
		}
		if got := r.fake.Calls(slot, kind); uint64(got) != want {
			return wrong(fmt.Sprintf("%s calls %s=%d", slot, key, want), fmt.Sprintf("%s=%d", key, got))
		}
	}
	return nil
}

func (r *runner) expectGaps(words []string) error {
	slot, kind, rest, err := parseCall(words)
	if err != nil {
		return err
	}
	var want, found []time.Duration
	for _, word := range rest {
		d, err := parseDuration(word)
		if err != nil {
			return err
		}
		want = append(want, d)
	}
	times := r.fake.CallTimes(slot, kind)
	for i := 1; i < len(times); i++ {
		found = append(found, times[i].Sub(times[i-1]))
	}
	if !slices.Equal(want, found) {
		return wrong(fmt.Sprintf("gaps %v", want), fmt.Sprintf("gaps %v between %d calls", found, len(times)))
	}
	return nil
}

func (r *runner) expectLive(words []string) error {
	if len(words) == 1 {
		return expectCount("live machines", words[0], r.fake.LiveTotal())
	}
	return expectSlotCount("live machines", words, r.fake.Live)
}

func (r *runner) expectCreated(words []string) error {
	return expectSlotCount("machines ever made", words, r.fake.Created)
}

func expectSlotCount(what string, words []string, count func(provisioning.LogicalNodeID) int) error {
	if len(words) != 2 {
		return wrong("a slot and a number", quoted(strings.Join(words, " ")))
	}
	slot, err := parseSlot(words[0])
	if err != nil {
		return err
	}
	return expectCount(what+" of "+words[0], words[1], count(slot))
}

func expectCount(what, word string, found int) error {
	want, err := parseNumber(word)
	if err != nil {
		return err
	}
	if uint64(found) != want {
		return wrong(fmt.Sprintf("%d %s", want, what), fmt.Sprint(found))
	}
	return nil
}

// one returns the only word of a line.
func one(words []string) (string, error) {
	if len(words) != 1 {
		return "", wrong("one value", quoted(strings.Join(words, " ")))
	}
	return words[0], nil
}

func (r *runner) expectRequeue(words []string) error {
	word, err := one(words)
	if err != nil {
		return err
	}
	at, ok := r.driver.RequeueAt()
	return expectMoment("requeue", word, at.Sub(r.now()), ok)
}

func expectMoment(what, word string, left time.Duration, set bool) error {
	wantLeft, wantSet, err := parseMoment(word)
	if err != nil {
		return err
	}
	if want, found := momentWord(wantLeft, wantSet), momentWord(left, set); want != found {
		return wrong(what+"="+want, found)
	}
	return nil
}

func (r *runner) expectConverged(words []string) error {
	word, err := one(words)
	if err != nil {
		return err
	}
	return expectFlag("converged", word, r.driver.Converged(r.shape.Generation))
}

func expectFlag(what, word string, found bool) error {
	want, err := parseFlag(word)
	if err != nil {
		return err
	}
	if want != found {
		return wrong(fmt.Sprintf("%s=%v", what, want), fmt.Sprint(found))
	}
	return nil
}

func (r *runner) expectObserved(words []string) error {
	word, err := one(words)
	if err != nil {
		return err
	}
	return expectNumber("observed", word, r.driver.ObservedGeneration())
}

func (r *runner) expectAttempts(words []string) error {
	word, err := one(words)
	if err != nil {
		return err
	}
	return expectNumber("attempts", word, uint64(r.driver.Snapshot().NextAttemptID-1))
}

// expectProgress compares how many desired slots are ready, of how many.
func (r *runner) expectProgress(words []string) error {
	word, err := one(words)
	if err != nil {
		return err
	}
	first, second, ok := strings.Cut(word, "/")
	wantReady, err := parseNumber(first)
	wantDesired, err2 := parseNumber(second)
	if !ok || err != nil || err2 != nil {
		return wrong("ready and desired, like 2/3", quoted(word))
	}
	ready, desired := r.driver.Progress()
	if uint64(ready) != wantReady || uint64(desired) != wantDesired {
		return wrong(fmt.Sprintf("progress=%d/%d", wantReady, wantDesired), fmt.Sprintf("%d/%d", ready, desired))
	}
	return nil
}

func expectNumber(what, word string, found uint64) error {
	want, err := parseNumber(word)
	if err != nil {
		return err
	}
	if want != found {
		return wrong(fmt.Sprintf("%s=%d", what, want), fmt.Sprint(found))
	}
	return nil
}

func (r *runner) expectSlot(words []string) error {
	slot, err := parseSlot(words[0])
	if err != nil {
		return wrong("a slot, or one of slots, calls, gaps, live, created, requeue, converged, observed, attempts and progress", quoted(words[0]))
	}
	if r.driver == nil {
		return wrong("a shape before expect "+words[0], "none")
	}
	if len(words) == 1 {
		return wrong("key=value or gone", "nothing")
	}
	node, there := r.driver.Node(slot)
	if words[1] == "gone" {
		if len(words) > 2 {
			return wrong("nothing else in the line", quoted(words[2]))
		}
		if there {
			return wrong(words[0]+" gone", fmt.Sprintf("it in stage %v, attempt %d", node.Record.Stage, node.Attempt))
		}
		return nil
	}
	for _, word := range words[1:] {
		key, value, err := parseAssignment(word)
		if err != nil {
			return err
		}
		if !there && (key != "rule" || r.wanted(slot) == nil) {
			return wrong(words[0]+" with "+word, "no such slot in the state")
		}
		var known *provisioning.ManagedNode
		if there {
			known = &node
		}
		if err := r.expectFact(slot, known, key, value); err != nil {
			if m, ok := err.(*invariant.Mismatch); ok {
				return wrong(words[0]+" "+m.Expected, m.Found)
			}
			return err
		}
	}
	return nil
}

// expectFact compares one fact of a slot. The node is nil for a slot that is
// not in the state, of which only the rule can be asked.
func (r *runner) expectFact(slot provisioning.LogicalNodeID, node *provisioning.ManagedNode, key, word string) error {
	now := r.driver.Clock(r.now())
	moment := func(at time.Time) error { return expectMoment(key, word, at.Sub(now), !at.IsZero()) }
	switch key {
	case "stage":
		var want provisioning.Stage
		return expectWord(key, word, &want, node.Record.Stage)
	case "intent":
		var want provisioning.Intent
		return expectWord(key, word, &want, node.Intent)
	case "ready":
		return expectFlag(key, word, node.Record.Ready)
	case "attempt":
		return expectNumber(key, word, uint64(node.Attempt))
	case "lease":
		return expectID(key, word, string(node.Record.Lease))
	case "session":
		return expectID(key, word, string(node.ActiveBootstrap))
	case "pending":
		found := provisioning.NoOperation
		if node.Pending != nil {
			found = node.Pending.Kind
		}
		return expectOperation(key, word, found)
	case "ambiguous":
		return expectOperation(key, word, node.Retry.Ambiguous)
	case "failures":
		return expectNumber(key, word, uint64(node.Retry.ConsecutiveFailures))
	case "cleanup-failures":
		return expectNumber(key, word, uint64(node.Retry.CleanupFailures))
	case "next":
		return moment(node.Retry.NextEffectAt)
	case "restart":
		return moment(node.Retry.RestartAt)
	case "deadline":
		return moment(node.Retry.StageDeadline)
	case "rule":
		return expectRule(word, provisioning.DecideNode(node, r.wanted(slot), now).Rule.Name)
	}
	return wrong("a fact of a slot", quoted(key))
}

// expectWord compares a value that has a name. want is where the expected one
// is read into.
func expectWord[T fmt.Stringer](key, word string, want interface{ UnmarshalText([]byte) error }, found T) error {
	if err := want.UnmarshalText([]byte(word)); err != nil {
		return wrong("a known "+key, quoted(word))
	}
	if word != found.String() {
		return wrong(key+"="+word, found.String())
	}
	return nil
}

func expectOperation(key, word string, found provisioning.OperationKind) error {
	if word != "none" {
		if _, err := parseOperation(word); err != nil {
			return err
		}
	}
	if word != operationWord(found) {
		return wrong(key+"="+word, operationWord(found))
	}
	return nil
}

// expectID compares an id, or whether there is one.
func expectID(key, word, found string) error {
	matches := false
	switch word {
	case "true":
		matches = found != ""
	case "false", "none":
		matches = found == ""
	default:
		matches = found == word
	}
	if matches {
		return nil
	}
	if found == "" {
		found = "none"
	}
	return wrong(key+"="+word, found)
}

func expectRule(word, found string) error {
	known := slices.ContainsFunc(provisioning.Ladder(), func(rule provisioning.Rule) bool { return rule.Name == word })
	if !known {
		return wrong("the name of a rule", quoted(word))
	}
	if word != found {
		return wrong("rule="+word, found)
	}
	return nil
}
