package scenario

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/swactor/provisioning"
)

// settle finds out what became of each call that nobody was told about.
func (t *teller) settle() error {
	for _, c := range t.ordered {
		c.hangs = !c.refused && !c.unbegun && (c.answer == nil || !c.queued && c.answered > c.batch+1)
	}
	for _, c := range t.ordered {
		// What an adopt-only create finds, an earlier one has made.
		if !c.adoptOnly || c.answer == nil ||
			c.answer.Class != provisioning.ClassNone && (c.answer.Class != provisioning.ClassLeaseLost || c.answer.Lease == "") {
			continue
		}
		var maker *call
		for _, earlier := range t.attempts[c.operation.Attempt] {
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
	for _, earlier := range t.attempts[c.operation.Attempt] {
		if earlier == c {
			return
		}
		if earlier.hangs && earlier.answer == nil && !earlier.returned {
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
