// Command quickstart plays the life of a small fleet: it converges, grows,
// loses a machine, rolls a new image, shrinks and is drained, at a provider
// that is slow and fails a lot. Time is virtual, so that minutes take seconds,
// and a seed repeats a run exactly.
package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"reflect"
	"syscall"

	"github.com/swactor/provisioning"
)

//go:embed fleet.json
var fleet []byte

// The range of -speed: a picture should neither take hours nor show hours.
const minSpeed, maxSpeed = 0.01, 10_000.0

const usage = `usage: quickstart [flags] [SHAPE.json [SECOND.json]]

SHAPE.json is the fleet to begin with; without it the fleet.json of this
example is used. With SECOND.json the fleet is changed into that one, instead
of growing, rolling an image and shrinking.

Exit status: 0 if everything the story claims was true, 1 if something was not
or could not be written, 2 if it could not begin.

`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run plays the program. What it said and could not write is a failure too.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	out := &sureWriter{to: stdout}
	code := begin(ctx, args, out, stderr)
	if out.err != nil {
		fmt.Fprintln(stderr, "quickstart:", printable(out.err.Error()))
		return max(code, 1)
	}
	return code
}

// sureWriter remembers the first error, so that one look at the end is enough.
type sureWriter struct {
	to  io.Writer
	err error
}

func (w *sureWriter) Write(p []byte) (int, error) {
	n, err := w.to.Write(p)
	if w.err == nil {
		w.err = err
	}
	return n, err
}

func begin(ctx context.Context, args []string, stdout *sureWriter, stderr io.Writer) int {
	flags := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprint(stderr, usage)
		flags.PrintDefaults()
	}
	seed := flags.Uint64("seed", 1, "what goes wrong; a run with the same seed is the same run")
	speed := flags.Float64("speed", 0, "virtual seconds in a second; 0 is 25 for the table and no waiting for lines")
	plain := flags.Bool("plain", false, "print lines also on a terminal")
	plan := flags.Bool("plan", false, "print what the first pass would do and why, and with -image or SECOND.json what that update\nwould change once the fleet is up, and exit")
	image := flags.String("image", "", "with -plan: the update is to this `image` in every group")
	journal := flags.String("journal", "", "write the journal of the run to this new `file`, for examples/replay")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	case flags.NArg() > 2:
		fmt.Fprintf(stderr, "quickstart: at most two shape files, not %d\n", flags.NArg())
		return 2
	case *speed != 0 && !(*speed >= minSpeed && *speed <= maxSpeed):
		fmt.Fprintf(stderr, "quickstart: -speed is %v, must be 0 or %v to %v\n", *speed, minSpeed, maxSpeed)
		return 2
	}
	empty := ""
	flags.Visit(func(f *flag.Flag) {
		if f.Value.String() == "" {
			empty = f.Name
		}
	})
	if empty != "" {
		fmt.Fprintf(stderr, "quickstart: -%s is empty\n", empty)
		return 2
	}
	if *journal != "" && *plan {
		fmt.Fprintln(stderr, "quickstart: -journal is for a run, and -plan is none")
		return 2
	}
	if *image != "" && (!*plan || flags.NArg() == 2) {
		fmt.Fprintln(stderr, "quickstart: -image is for -plan with one shape")
		return 2
	}
	shapes, faults := readShapes(flags.Args())
	if faults != nil {
		for _, fault := range faults {
			fmt.Fprintln(stderr, printable(fault))
		}
		return 2
	}

	var shown view = &lines{out: stdout, pace: pace{speed: *speed}}
	if *plan {
		shown = &lines{out: io.Discard}
	} else if !*plain && isTerminal(stdout.to) {
		shown = newTable(stdout, *speed)
	}
	var kept io.Writer // a nil interface, where no file is a nil *os.File
	var file *os.File
	if *journal != "" {
		var err error
		if file, err = createNew(*journal); err != nil {
			fmt.Fprintln(stderr, "quickstart:", printable(err.Error()))
			return 2
		}
		defer file.Close() // again, after an early return
		kept = file
	}
	s, err := newStory(*seed, shapes, shown, kept)
	if err != nil {
		fmt.Fprintln(stderr, printable(err.Error()))
		return 2
	}
	if *plan {
		printPlan(stdout, s.host.Driver().Plan(s.provider.Now()))
		if *image != "" {
			shapes = append(shapes, withImage(shapes[0], *image))
		}
		if len(shapes) == 1 {
			return 0
		}
		return reportUntrue(stderr, planUpdate(ctx, stdout, s, shapes[1]))
	}
	untrue := s.tell(ctx)
	if file != nil {
		if err := errors.Join(s.host.Driver().JournalErr(), file.Close()); err != nil {
			untrue = append(untrue, "the journal is whole: "+err.Error())
		}
	}
	return report(stdout, stderr, s, untrue)
}

// createNew creates a file and overwrites none: the journal that is there may be
// of the day that somebody looks into. A device or a pipe may be there.
func createNew(name string) (*os.File, error) {
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if there, statErr := os.Stat(name); errors.Is(err, fs.ErrExist) && statErr == nil && !there.Mode().IsRegular() {
		return os.OpenFile(name, os.O_WRONLY, 0)
	}
	return file, err
}

// report says how a story went.
func report(stdout, stderr io.Writer, s *story, untrue []string) int {
	s.printSummary(stdout)
	code := reportUntrue(stderr, untrue)
	if code == 0 {
		fmt.Fprintln(stdout, "Every chapter ended as it should.")
	}
	return code
}

func reportUntrue(stderr io.Writer, untrue []string) int {
	for _, what := range untrue {
		fmt.Fprintln(stderr, "not true:", printable(what))
	}
	return min(len(untrue), 1)
}

// readShapes reads one or two shape files, none means fleet.json, and lists
// everything that is wrong with them.
func readShapes(names []string) (shapes []provisioning.ClusterShape, faults []string) {
	if len(names) == 0 {
		names = []string{""}
	}
	var first *provisioning.ClusterDriver
	for _, name := range names {
		say := func(fault string) { faults = append(faults, name+": "+fault) }
		shape, reader, err := readShape(name)
		if err != nil {
			say(err.Error())
			continue
		}
		for _, fault := range reader.faults {
			say(fault)
		}
		driver, err := provisioning.NewClusterDriver(shape, provisioning.Config{MaxNodes: maxSlots})
		if err == nil && first != nil && len(reader.unread) == 0 { // a lawful successor of the first?
			err = first.UpdateDesired(shape)
		}
		var refused *provisioning.ShapeError
		switch {
		case errors.As(err, &refused):
			for _, fault := range refused.Faults {
				if !reader.hides(fault) {
					say(fault.String())
				}
			}
		case err != nil:
			say(err.Error())
		case first == nil:
			first = driver
		}
		shapes = append(shapes, shape)
	}
	return shapes, faults
}

// readShape reads a shape, strictly: a field that nobody knows is a typing
// error that would cost money. The reader tells what is wrong with it, the
// error that it is no JSON at all.
func readShape(name string) (shape provisioning.ClusterShape, reader strictReader, err error) {
	text := fleet
	if name != "" {
		if text, err = os.ReadFile(name); err != nil {
			return shape, reader, errors.Unwrap(err) // the caller names the file
		}
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	var value json.RawMessage
	err = decoder.Decode(&value)
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		return shape, reader, fmt.Errorf("line %d: %w", 1+bytes.Count(text[:syntax.Offset], []byte("\n")), err)
	}
	if errors.Is(err, io.EOF) {
		return shape, reader, errors.New("the file is empty")
	}
	if err != nil {
		return shape, reader, err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return shape, reader, errors.New("something follows the shape")
	}
	reader.read("", value, reflect.ValueOf(&shape).Elem())
	return shape, reader, nil
}
