// Package driving is the middle of a program that drives a fleet: it follows the
// shape file, drains when it is told to, and ends in order. What a fleet is made
// of, and what is left of it, is for the program.
package driving

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/control"
	"github.com/swactor/provisioning/examples/localfleet/runs"
	"github.com/swactor/provisioning/examples/localfleet/shapefile"
	"github.com/swactor/provisioning/examples/localfleet/status"
)

// ExitAtOnce is the exit status of a program that a second interrupt ended.
const ExitAtOnce = 130 // as a shell says of one that SIGINT ended

const (
	// lookEvery is how often the shape file is looked at.
	lookEvery = 250 * time.Millisecond
	// closeTimeout bounds the goodbye to pages and commands.
	closeTimeout = 2 * time.Second
)

// Controller drives one run. Its Host has to be set before Drive.
type Controller struct {
	*status.Fleet
	GiveBack string // the command that gives back what it leaves

	path   string // of the shape file
	drains chan struct{}
	once   sync.Once

	mu    sync.Mutex
	wish  provisioning.ClusterShape // the accepted one
	ended error                     // why nothing is driven any more
}

// New returns the controller of a run that begins with these groups, which were
// read from path. name is that of the program.
func New(name, path, giveBack string, record runs.Record, groups []provisioning.NodeGroupSpec) *Controller {
	ctl := &Controller{
		Fleet:    &status.Fleet{Name: name, Journal: new(status.Journal), Run: record.Run, Began: record.BeganAt},
		GiveBack: giveBack, path: path, drains: make(chan struct{}),
		wish: provisioning.ClusterShape{RunID: record.Run, Generation: 1, Groups: groups},
	}
	ctl.Ended = ctl.why
	ctl.Journal.Loaded(path)
	return ctl
}

// Wish returns the wish that was accepted last.
func (ctl *Controller) Wish() provisioning.ClusterShape {
	ctl.mu.Lock()
	defer ctl.mu.Unlock()
	return ctl.wish
}

// Drive drives until it is interrupted, everything is drained, or the library
// gives up, then ends the showing and closes the host. A second interrupt ends the
// program at once. What people have to know is written to out.
func (ctl *Controller) Drive(watcher *shapefile.Watcher, interrupts <-chan os.Signal, out io.Writer, showed func()) error {
	ctx, stop := context.WithCancelCause(context.Background())
	defer stop(nil)
	ran := make(chan error, 1)
	go func() { ran <- ctl.Host.Run(ctx) }()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	drains, drained := ctl.drains, make(chan error, 1)
	var cause, err error // why it ends, and whether that is a failure
	for cause == nil {
		select {
		case <-look.C:
			ctl.reload(watcher)
		case <-drains:
			drains = nil
			go func() { drained <- ctl.Host.Drain(ctx) }()
		case err = <-drained:
			cause = cmp.Or(err, errDrained)
		case err = <-ran: // by itself: it holds something, or has driven to no avail
			cause = cmp.Or(err, errLoopEnded)
			err = cause
			ran <- nil
		case s := <-interrupts:
			cause = fmt.Errorf("%v", s)
			go ctl.leaveAtOnce(interrupts, out)
		}
	}
	ctl.end(cause)
	stop(cause)
	showed()
	fmt.Fprintf(out, "%v: stopping\n", cause)
	<-ran
	_, closeErr := ctl.Host.Close(context.Background()) // its ctx is leaveAtOnce
	return errors.Join(err, closeErr)
}

var (
	errDrained   = errors.New("everything is given back")
	errLoopEnded = errors.New("fleet: the loop has ended")
)

// leaveAtOnce ends the program at the next interrupt, whatever it waits for.
// The run is on record.
func (ctl *Controller) leaveAtOnce(interrupts <-chan os.Signal, out io.Writer) {
	<-interrupts
	fmt.Fprintf(out, "Left at once. What run %s holds goes on; give it back with: %s\n", ctl.Run, ctl.GiveBack)
	os.Exit(ExitAtOnce)
}

// reload offers what the file says now. The generation is not in the file: it
// rises by one with every change of content, which is for the library to see.
func (ctl *Controller) reload(watcher *shapefile.Watcher) {
	groups, changed, err := watcher.Look()
	if err == nil && !changed {
		return
	}
	if err == nil {
		ctl.mu.Lock()
		defer ctl.mu.Unlock()
		next := ctl.wish
		next.Groups = groups
		err = ctl.Host.UpdateDesired(next)
		if errors.Is(err, provisioning.ErrGenerationReused) {
			next.Generation++
			err = ctl.Host.UpdateDesired(next)
		}
		if err == nil {
			ctl.wish = next
			ctl.Journal.Loaded(ctl.path)
			return
		}
	}
	ctl.Journal.Refused(ctl.path, err)
}

func (ctl *Controller) end(cause error) {
	ctl.mu.Lock()
	defer ctl.mu.Unlock()
	ctl.ended = cause
}

func (ctl *Controller) why() error {
	ctl.mu.Lock()
	defer ctl.mu.Unlock()
	return ctl.ended
}

// Plan implements [control.Controller], as do Drain and what the fleet has. Break
// is for the program.
func (ctl *Controller) Plan(groups []provisioning.NodeGroupSpec) (control.Plan, error) {
	next := ctl.Wish()
	driver := ctl.Host.Driver()
	now := time.Now()
	if groups == nil {
		return control.PlanOf(driver.Plan(now), driver.Snapshot()), nil
	}
	next.Groups = groups
	next.Generation++
	desired, err := provisioning.Expand(next)
	if err != nil {
		return control.Plan{}, err
	}
	observed := driver.Snapshot()
	return control.PlanOf(provisioning.Decide(observed, desired, driver.Clock(now)), observed), nil
}

func (ctl *Controller) Drain() { ctl.once.Do(func() { close(ctl.drains) }) }

// Bounded closes a server whose clients may not want to go.
func Bounded(closing func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	if err := closing(ctx); !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}
