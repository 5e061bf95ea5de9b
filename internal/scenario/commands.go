package scenario

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/fakebackend"
)

// command is one word of the language that begins a line. config is not among
// them: it is read before there is a world.
type command struct {
	run func(r *runner, words []string) error
	// needsDriver: there must have been a shape. quiet: nothing happens, so
	// nothing is driven or checked.
	needsDriver, quiet bool
}

var commands map[string]command

func init() { // the table leads back to itself through reject
	commands = map[string]command{
		"shape":   {run: (*runner).doShape},
		"reject":  {run: (*runner).doReject},
		"trigger": {run: (*runner).doTrigger, needsDriver: true},
		"drain":   {run: (*runner).doDrain, needsDriver: true},
		"pause":   {run: (*runner).doPause, needsDriver: true},
		"resume":  {run: (*runner).doResume, needsDriver: true},
		"replace": {run: (*runner).doReplace, needsDriver: true},
		"pass":    {run: (*runner).doPass, needsDriver: true},
		"drive":   {run: (*runner).doDrive, needsDriver: true},
		"answer":  {run: (*runner).doAnswer, needsDriver: true},
		"script":  {run: (*runner).doScript, quiet: true},
		"release": {run: (*runner).doRelease},
		"remove":  {run: (*runner).doRemove},
		"event":   {run: (*runner).doEvent, needsDriver: true},
		"advance": {run: (*runner).doAdvance},
		"jump":    {run: (*runner).doJump},
		"expect":  {run: (*runner).doExpect, quiet: true},
	}
}

func (r *runner) doShape(words []string) error {
	shape, err := parseShape(words)
	if err != nil {
		return err
	}
	if err := r.wish(shape); err != nil {
		return wrong("the shape to be accepted", err.Error())
	}
	return nil
}

func (r *runner) doReject(words []string) error {
	if len(words) == 0 || words[0] != "shape" {
		return wrong("reject shape", "reject "+strings.Join(words, " "))
	}
	shape, err := parseShape(words[1:])
	if err != nil {
		return err
	}
	before, err := r.known()
	if err != nil {
		return err
	}
	refusal := r.wish(shape)
	if refusal == nil {
		return wrong("the shape to be refused", "it accepted")
	}
	r.trace.add("    refused: %v", refusal)
	after, err := r.known()
	if err != nil {
		return err
	}
	if !bytes.Equal(before, after) {
		return wrong(fmt.Sprintf("the refusal to change nothing: %s", before), string(after))
	}
	return nil
}

// known is what a refused shape must leave as it is.
func (r *runner) known() ([]byte, error) {
	if r.driver == nil {
		return nil, nil
	}
	requeue, _ := r.driver.RequeueAt()
	return json.Marshal([]any{r.driver.Snapshot(), requeue, r.driver.Converged(r.shape.Generation), r.driver.Plan(r.now()).Actions})
}

func (r *runner) doTrigger(words []string) error {
	r.driver.Trigger()
	return nothingElse(words)
}

func (r *runner) doDrain(words []string) error {
	if err := nothingElse(words); err != nil {
		return err
	}
	if err := r.driver.Drain(); err != nil {
		return wrong("the last wish to be accepted", err.Error())
	}
	return r.wished(provisioning.ClusterShape{RunID: r.shape.RunID, Generation: r.driver.Generation()})
}

func (r *runner) doPause(words []string) error {
	r.driver.Pause()
	return nothingElse(words)
}

func (r *runner) doResume(words []string) error {
	r.driver.Resume()
	return nothingElse(words)
}

func (r *runner) doReplace(words []string) error {
	if len(words) != 1 {
		return wrong("a slot", quoted(strings.Join(words, " ")))
	}
	slot, err := parseSlot(words[0])
	if err != nil {
		return err
	}
	if _, err := r.driver.Replace(slot, "by hand"); err != nil {
		return wrong("a slot that is there", err.Error())
	}
	return nil
}

func (r *runner) doPass(words []string) error {
	if err := nothingElse(words); err != nil {
		return err
	}
	return r.pass()
}

func (r *runner) doDrive(words []string) error {
	if err := nothingElse(words); err != nil {
		return err
	}
	return r.drive()
}

func (r *runner) doAnswer(words []string) error {
	r.answer()
	return nothingElse(words)
}

func nothingElse(words []string) error {
	if len(words) > 0 {
		return wrong("nothing else in the line", quoted(words[0]))
	}
	return nil
}

// parseCall reads "SLOT OP" and what follows.
func parseCall(words []string) (provisioning.LogicalNodeID, provisioning.OperationKind, []string, error) {
	if len(words) < 2 {
		return "", 0, nil, wrong("a slot and an operation", quoted(strings.Join(words, " ")))
	}
	slot, err := parseSlot(words[0])
	if err != nil {
		return "", 0, nil, err
	}
	kind, err := parseOperation(words[1])
	return slot, kind, words[2:], err
}

// parseOutcomes reads outcomes that make sense for an operation.
func parseOutcomes(kind provisioning.OperationKind, words []string) ([]fakebackend.Outcome, error) {
	var all []fakebackend.Outcome
	for _, word := range words {
		outcomes, err := fakebackend.ParseOutcome(word)
		if err == nil {
			err = outcomes[0].Fits(kind)
		}
		if err != nil {
			return nil, wrong("an outcome of "+operationWord(kind), err.Error())
		}
		all = append(all, outcomes...)
	}
	if all == nil {
		return nil, wrong("an outcome", "nothing")
	}
	return all, nil
}

func (r *runner) doScript(words []string) error {
	slot, kind, rest, err := parseCall(words)
	if err != nil {
		return err
	}
	outcomes, err := parseOutcomes(kind, rest)
	if err != nil {
		return err
	}
	r.fake.Script(slot, kind, outcomes...)
	return nil
}

func (r *runner) doRelease(words []string) error {
	slot, kind, rest, err := parseCall(words)
	if err != nil {
		return err
	}
	outcomes, err := parseOutcomes(kind, rest)
	if err != nil {
		return err
	}
	if len(outcomes) != 1 {
		return wrong("one outcome", strings.Join(rest, " "))
	}
	if err := r.fake.Release(slot, kind, outcomes[0]); err != nil {
		return wrong("a hanging call to release", err.Error())
	}
	return nil
}

func (r *runner) doRemove(words []string) error {
	if len(words) != 1 {
		return wrong("a slot", quoted(strings.Join(words, " ")))
	}
	slot, err := parseSlot(words[0])
	if err != nil {
		return err
	}
	if r.fake.Remove(slot) == 0 {
		return wrong("a live machine of "+words[0], "none")
	}
	return nil
}

func (r *runner) doAdvance(words []string) error {
	if len(words) != 1 {
		return wrong("a duration", quoted(strings.Join(words, " ")))
	}
	d, err := parseDuration(words[0])
	if err != nil {
		return err
	}
	if d < 0 {
		return wrong("a duration that is not negative; jump goes back", quoted(words[0]))
	}
	if err := r.advance(d); err != nil {
		return err
	}
	r.tell()
	return nil
}

func (r *runner) doJump(words []string) error {
	if len(words) != 1 {
		return wrong("a duration", quoted(strings.Join(words, " ")))
	}
	d, err := parseDuration(words[0])
	if err != nil {
		return err
	}
	r.jump(d)
	r.tell()
	return nil
}

// tell lets the driver read the clock where nothing drives it, as every host
// does when it looks whether something is due. Otherwise what the clock was
// set back would be missing from the next wait.
func (r *runner) tell() {
	if r.driver != nil {
		r.driver.TriggerIfDue(r.now())
	}
}

var streamWords = []string{"joined", "closed", "failed", "lost", "stage"}

func (r *runner) doEvent(words []string) error {
	if len(words) < 2 {
		return wrong("a slot and what is seen of it", quoted(strings.Join(words, " ")))
	}
	slot, err := parseSlot(words[0])
	if err != nil {
		return err
	}
	what, stage, hasStage := strings.Cut(words[1], "=")
	if !slices.Contains(streamWords, what) || hasStage != (what == "stage") {
		return wrong("joined, closed, failed, lost or stage=STAGE", quoted(words[1]))
	}
	attempt, id := provisioning.NodeAttemptID(0), ""
	for _, word := range words[2:] {
		key, value, err := parseAssignment(word)
		if err != nil {
			return err
		}
		switch key {
		case "attempt":
			n, err := parseNumber(value)
			if err != nil {
				return err
			}
			attempt = provisioning.NodeAttemptID(n)
		case "id":
			id = value
		default:
			return wrong("attempt=N or id=NAME", quoted(word))
		}
	}
	if attempt == 0 {
		node, ok := r.driver.Node(slot)
		if !ok {
			return wrong("a slot that is there, or attempt=N", words[0]+", which is not")
		}
		attempt = node.Attempt
	}
	o, err := r.observation(slot, attempt, what, stage, id)
	if err != nil {
		return err
	}
	r.driver.Deliver(o)
	return nil
}

// observation makes what a stream says. id is the name of the agent that
// joined, of any other observation that of the session.
func (r *runner) observation(slot provisioning.LogicalNodeID, attempt provisioning.NodeAttemptID, what, stage, id string) (provisioning.Observation, error) {
	key := provisioning.ExternalKey{Run: run, Node: slot, Attempt: attempt}
	o := provisioning.Observation{Node: slot, Attempt: attempt, Session: r.fake.SessionID(key)}
	if what == "joined" {
		o.Kind, o.Swactor = provisioning.SwactorJoined, fakebackend.SwactorID(key)
		if id != "" {
			o.Swactor = provisioning.SwactorID(id)
		}
		return o, nil
	}
	if id != "" {
		o.Session = provisioning.BootstrapSessionID(id)
	}
	switch what {
	case "closed":
		o.Kind = provisioning.BootstrapClosed
	case "failed":
		o.Kind, o.Reason = provisioning.BootstrapFailed, "the bootstrap broke"
	case "lost":
		o.Kind, o.Reason, o.Session = provisioning.NodeLost, "the machine is gone", ""
	case "stage":
		o.Kind = provisioning.BootstrapProgress
		if err := o.Stage.UnmarshalText([]byte(stage)); err != nil || o.Stage == provisioning.NoBootstrapStage {
			return o, wrong("a bootstrap stage, like SSHReady", quoted(stage))
		}
	}
	return o, nil
}
