package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/swactor/provisioning"
)

const (
	// maxSlots bounds the shapes that are read; growing adds a few to it.
	maxSlots = 64
	growth   = 2
	// patience is how long in virtual time a chapter may take.
	patience = 2 * time.Hour
)

// chapter is a change of the wish or of the world, and the way until the fleet
// is as wished again.
type chapter struct {
	title string
	wish  *provisioning.ClusterShape // nil: the wish stays as it is
	lose  bool                       // the provider takes a machine back
	drain bool                       // the end: wish for nothing

	// How it went.
	text     string
	begun    bool
	ended    bool
	took     time.Duration
	machines int
	untrue   []string
}

// newChapters makes the story of a fleet: with one shape of what can be done
// to it, with two of how the first becomes the second.
func newChapters(shapes []provisioning.ClusterShape) []*chapter {
	wish := shapes[0]
	slots := 0
	chapters := []*chapter{{title: "converge", wish: &shapes[0], text: "from nothing to the wish"}}
	add := func(c *chapter) { chapters = append(chapters, c) }
	change := func(title, text string, edit func(groups []provisioning.NodeGroupSpec)) {
		next := wish
		next.Generation++
		next.Groups = slices.Clone(wish.Groups)
		edit(next.Groups)
		add(&chapter{title: title, text: text, wish: &next})
		wish = next
	}
	for _, group := range wish.Groups {
		slots += group.Count
	}
	lose := &chapter{title: "lose a node", lose: true}
	last := len(wish.Groups) - 1
	switch {
	case len(shapes) == 2:
		if slots > 0 {
			add(lose)
		}
		add(&chapter{title: "change", text: "the second shape", wish: &shapes[1]})
	case last >= 0:
		count := wish.Groups[last].Count
		change("scale up", fmt.Sprintf("%d more in %s", growth, wish.Groups[last].GroupID), func(groups []provisioning.NodeGroupSpec) {
			groups[last].Count += growth
		})
		add(lose)
		change("roll", "a new image for every node", func(groups []provisioning.NodeGroupSpec) {
			for i := range groups {
				groups[i].Shape.Image += "-next"
			}
		})
		change("scale down", fmt.Sprintf("%d fewer in %s", growth, wish.Groups[last].GroupID), func(groups []provisioning.NodeGroupSpec) {
			groups[last].Count = count
		})
	}
	add(&chapter{title: "drain", text: "give everything back", drain: true})
	return chapters
}

// story is a fleet, the provider it is rented from, and what happens to them.
// Everything runs on one goroutine, in virtual time.
type story struct {
	provider *provider
	host     *provisioning.Host
	shown    view
	chapters []*chapter
	wish     provisioning.ClusterShape // in force
	begunAt  time.Time
	seed     uint64
	// chapterAt is when the chapter began that is being played.
	chapterAt time.Time
	failures  map[provisioning.FailureClass]int
	// atRest is called whenever nothing is left to do at this instant: the
	// time moves next. It may end the chapter.
	atRest func(from, to time.Time)
}

// newStory returns a story that is yet to be told. The journal of its driver is
// written to journal, unless that is nil.
func newStory(seed uint64, shapes []provisioning.ClusterShape, shown view, journal io.Writer) (*story, error) {
	s := &story{
		provider: newProvider(seed),
		shown:    shown,
		chapters: newChapters(shapes),
		seed:     seed,
		failures: make(map[provisioning.FailureClass]int),
	}
	s.begunAt = s.provider.Now()
	var err error
	s.host, err = provisioning.NewHost(provisioning.HostConfig{
		Shape:    shapes[0],
		Backend:  s.provider,
		Retry:    retry,
		MaxNodes: maxSlots + growth,
		OnEvent:  s.event,
		Journal:  journal,
		// Without these two lines it would run on the machine's clock and
		// on goroutines.
		Clock: s.provider.work.Clock(func(from, to time.Time) { s.atRest(from, to) }),
		Go:    s.provider.work.Go,
	})
	return s, err
}

// tell runs the story and returns what was not true of it.
func (s *story) tell(ctx context.Context) (untrue []string) {
	s.shown.open()
	defer s.shown.close()
	for _, c := range s.chapters {
		s.play(ctx, c)
		for _, what := range c.untrue {
			untrue = append(untrue, c.title+": "+what)
		}
		if untrue != nil {
			break
		}
	}
	s.provider.end()
	if _, err := s.host.Close(ctx); err != nil {
		untrue = append(untrue, err.Error())
	}
	return untrue
}

// play plays one chapter to its end and writes down how it went.
func (s *story) play(ctx context.Context, c *chapter) {
	driver := s.host.Driver()
	before := slices.Collect(driver.Snapshot().All())
	s.chapterAt = s.provider.Now()
	c.begun = true

	drive := s.host.Run
	var lost provisioning.LogicalNodeID
	switch {
	case c.wish != nil:
		if err := s.host.UpdateDesired(*c.wish); err != nil {
			c.untrue = []string{err.Error()}
			return
		}
		s.wish = *c.wish
		s.makeTrouble(before)
	case c.lose:
		key, ok := s.provider.takeBack()
		if !ok {
			c.untrue = []string{"there is no machine to lose"}
			return
		}
		lost = key.Node
		c.text = fmt.Sprintf("the spot machine of %s is taken back", lost)
		s.makeTrouble(before)
		s.host.Deliver(provisioning.Observation{
			Kind: provisioning.NodeLost, Node: key.Node, Attempt: key.Attempt, Reason: "the spot market took it back",
		})
	case c.drain:
		s.wish = provisioning.ClusterShape{RunID: s.wish.RunID, Generation: s.wish.Generation + 1} // as Drain will
		s.makeTrouble(before)
		drive = s.host.Drain
	}
	s.shown.begin(s, c)
	err := s.settle(ctx, drive)
	c.took = s.provider.Now().Sub(s.chapterAt)
	c.machines = s.provider.LiveTotal()
	if err != nil {
		c.untrue = append(c.untrue, err.Error())
	}
	c.untrue = append(c.untrue, s.judge(c, before, lost)...)
	c.ended = true
	s.shown.end(ctx, s, c)
}

// makeTrouble draws what goes wrong in this chapter with the slots that are
// there and those that will be.
func (s *story) makeTrouble(there []provisioning.ManagedNode) {
	var slots []provisioning.LogicalNodeID
	for _, node := range there {
		slots = append(slots, node.Record.Node)
	}
	for _, group := range s.wish.Groups {
		for index := range group.Count {
			if slot := provisioning.NewLogicalNodeID(group.GroupID, index); !slices.Contains(slots, slot) {
				slots = append(slots, slot)
			}
		}
	}
	for _, slot := range slots {
		s.provider.makeTrouble(slot)
	}
}

var (
	errSettled = errors.New("settled")
	errOverdue = fmt.Errorf("the fleet was not as wished after %v", patience)
)

// settle drives until the fleet is as wished. A service would have the host
// run on a goroutine for its whole life, and call WaitConverged; here the host
// is stopped at the end of each chapter, so that time stands still meanwhile.
func (s *story) settle(ctx context.Context, drive func(context.Context) error) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	driver := s.host.Driver()
	s.atRest = func(from, to time.Time) {
		switch {
		case driver.Converged(driver.Generation()):
			stop(errSettled)
		case to.Sub(s.chapterAt) > patience:
			stop(errOverdue)
		default:
			s.shown.pass(ctx, s, from, to)
		}
	}
	err := drive(ctx)
	switch cause := context.Cause(ctx); {
	case cause == errSettled:
		return nil
	case err == nil:
		return cause // nil after a Drain that has ended by itself
	}
	return err
}

// judge returns what is not true at the end of a chapter.
func (s *story) judge(c *chapter, before []provisioning.ManagedNode, lost provisioning.LogicalNodeID) (untrue []string) {
	say := func(format string, args ...any) { untrue = append(untrue, fmt.Sprintf(format, args...)) }
	driver := s.host.Driver()
	if !driver.Converged(driver.Generation()) {
		say("the fleet has not converged to generation %d", driver.Generation())
	}
	state := driver.Snapshot()
	if err := state.Check(); err != nil {
		say("%v", err)
	}

	// Every slot of the wish has the one machine that is on record for it,
	// and there is no other machine.
	machines := make(map[provisioning.ExternalKey][]provisioning.ProviderLeaseID)
	for _, m := range s.provider.Machines() {
		machines[m.Key] = append(machines[m.Key], m.Lease)
	}
	desired, err := provisioning.Expand(s.wish)
	if err != nil {
		return append(untrue, err.Error())
	}
	for spec := range desired.All() {
		node, ok := state.Node(spec.Node)
		if !ok {
			say("%s is not there", spec.Node)
			continue
		}
		key := provisioning.ExternalKey{Run: spec.RunID, Node: spec.Node, Attempt: node.Attempt}
		if !node.Record.Spec.Equal(spec) {
			say("%s is built from another spec", spec.Node)
		}
		if !slices.Equal(machines[key], []provisioning.ProviderLeaseID{node.Record.Lease}) {
			say("%s should have the machine %q and has %q", spec.Node, node.Record.Lease, machines[key])
		}
	}
	if got := s.provider.LiveTotal(); got != desired.Len() {
		say("%d machines are billed for %d slots", got, desired.Len())
	}

	// A node was replaced exactly if it had to be.
	for _, old := range before {
		node, ok := state.Node(old.Record.Node)
		if !ok {
			continue
		}
		must := old.Record.Node == lost || !old.Record.Spec.Equal(node.Record.Spec)
		if replaced := old.Attempt != node.Attempt; replaced != must {
			say("%s went from attempt %d to %d", old.Record.Node, old.Attempt, node.Attempt)
		}
	}

	// No retry ever bought a second machine, and none was forgotten.
	for _, key := range s.provider.buyers {
		if n := s.provider.CreatedKey(key); n > 1 {
			say("attempt %d of %s bought %d machines", key.Attempt, key.Node, n)
		}
	}
	if bought, returned := s.provider.count(); bought != returned+s.provider.lost+s.provider.LiveTotal() {
		say("%d machines were bought, %d given back, %d lost, and %d are there", bought, returned, s.provider.lost, s.provider.LiveTotal())
	}
	if c.drain && len(s.host.Held()) > 0 {
		say("still held: %v", s.host.Held())
	}
	return untrue
}

// event counts what the driver does and shows it.
func (s *story) event(e provisioning.Event) {
	if e.Kind == provisioning.EventFold && e.Observation.Completion.Class != provisioning.ClassNone {
		s.failures[e.Observation.Completion.Class]++
	}
	s.shown.event(s, e)
}

// printSummary says what it took.
func (s *story) printSummary(out io.Writer) {
	fmt.Fprintf(out, "\n%-14s %12s %9s\n", "chapter", "virtual time", "machines")
	for _, c := range s.chapters {
		if c.ended {
			fmt.Fprintf(out, "%-14s %12s %9d\n", c.title, clock(c.took), c.machines)
		} else {
			fmt.Fprintf(out, "%-14s %12s\n", c.title, "not played")
		}
	}
	bought, returned := s.provider.count()
	fmt.Fprintf(out, "\nattempts  %d\nmachines  %d bought, %d given back, %d lost, %d left\n",
		s.host.Status().Driver.Attempts, bought, returned, s.provider.lost, s.provider.LiveTotal())
	fmt.Fprintln(out, "calls")
	for kind := provisioning.CreateLease; kind <= provisioning.DestroyLease; kind++ {
		fmt.Fprintf(out, "          %-29v %4d\n", kind, s.provider.calls[kind])
	}
	fmt.Fprintln(out, "failures")
	for class := provisioning.ClassDefinite; class <= provisioning.ClassLeaseLost; class++ {
		fmt.Fprintf(out, "          %-29v %4d\n", class, s.failures[class])
	}
	fmt.Fprintf(out, "seed      %d\n\n", s.seed)
}
