package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/atomicfile"
	"github.com/swactor/provisioning/examples/localfleet/control"
	"github.com/swactor/provisioning/examples/localfleet/driving"
	"github.com/swactor/provisioning/examples/localfleet/runs"
	"github.com/swactor/provisioning/examples/localfleet/shapefile"
	"github.com/swactor/provisioning/examples/localfleet/status"
	"github.com/swactor/provisioning/examples/localfleet/view"
	"github.com/swactor/provisioning/examples/sshfleet/internal/backend"
	"github.com/swactor/provisioning/examples/sshfleet/internal/hosts"
	"github.com/swactor/provisioning/examples/sshfleet/internal/inventory"
)

const (
	// commandTimeout bounds the verify commands of a host together, and its
	// clean-up command.
	commandTimeout = 10 * time.Minute
	// lookTimeout bounds the look for what earlier runs have left.
	lookTimeout = 30 * time.Second
)

// policy is that of machines which are there already: a claim is quick, and a
// host that does not answer may do so in a moment. What takes its time are the
// commands of a shape.
var policy = provisioning.RetryPolicy{
	InitialDelay: time.Second, MaxDelay: 30 * time.Second, Jitter: 0.3, OperationTimeout: time.Minute,
	OperationTimeouts: map[provisioning.OperationKind]time.Duration{
		provisioning.StartBootstrap: commandTimeout, provisioning.DestroyLease: commandTimeout,
	},
	EndpointTimeout: time.Minute, BootstrapTimeout: 2 * commandTimeout,
}

// controller drives one run over hosts of one's own.
type controller struct{ *driving.Controller }

func up(c *command, args []string) (err error) {
	hostFile := c.inventory()
	shape := c.flags.String("shape", "fleet.yaml", "the `FILE` with the wish, YAML or .json; it is read again when it changes")
	joinAt := c.flags.String("join", "127.0.0.1:0", "take joins at `ADDR`")
	advertise := c.flags.String("advertise", "", "the same `ADDR` as hosts reach it, if it is another")
	page := c.flags.String("http", "", "serve the status page at `ADDR`, such as :8080; without a host it is one of loopback")
	public := c.flags.Bool("http-public", false, "let -http serve other computers too; whoever reaches the page needs no password")
	lines := c.flags.Bool("plain", false, "print lines also on a terminal")
	inFlight := c.flags.Int("max-in-flight", 16, "calls in flight at once; 0 is no limit")
	if _, err := c.parse(args, 0); err != nil {
		return err
	}
	all, err := inventory.Read(*hostFile)
	if err != nil {
		return err
	}
	watcher, groups, err := shapefile.Watch(*shape)
	if err != nil {
		return err
	}
	dir := runs.Dir(c.dir)
	lock, err := await(context.Background(), dir, lockTimeout)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	secrets, err := makeSecrets(c.dir)
	if err != nil {
		return err
	}

	// On record before the first create: whatever happens from here on, drain
	// finds the claims of this run.
	record, err := dir.Begin()
	if err != nil {
		return err
	}
	begun := false
	defer func() {
		if !begun {
			err = errors.Join(err, dir.Forget(record.Run))
		}
	}()
	if record.Inventory, err = inventoryPath(*hostFile); err != nil {
		return err
	}
	b, err := backend.Open(backend.Config{
		Hosts: all, Secrets: secrets, Run: record.Run, JoinAddress: *joinAt, Advertise: *advertise,
		Reach: hosts.Config{Claiming: recordPlaces(dir, record)},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	ctl := &controller{driving.New("sshfleet", *shape, c.hint("drain", *hostFile), record, groups)}
	ctl.Host, err = provisioning.NewHost(provisioning.HostConfig{
		Shape: ctl.Wish(), Backend: b, Retry: policy, MaxInFlight: *inFlight, MaxNodes: shapefile.MaxNodes,
		OnEvent: ctl.Journal.OnEvent,
	})
	if err != nil {
		return err
	}

	intro := fmt.Sprintf("run %s in %s, agents join at %s", record.Run, c.dir, b.JoinAddr())
	if *page != "" {
		server, err := status.Serve(*page, *public, ctl.Fleet)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, driving.Bounded(server.Close)) }()
		intro += ", page at " + server.URL()
	}
	commands, err := control.Serve(c.dir, ctl)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, driving.Bounded(commands.Close)) }()

	var showed func() // ends the showing
	if !*lines && view.IsTerminal(c.out) {
		showed = view.ShowTable(c.out, ctl.Fleet, intro+"   Ctrl-C stops driving, the agents go on")
	} else {
		fmt.Fprintln(c.out, intro)
		showed = view.ShowLines(c.out, ctl.Journal)
	}
	if onlyHere(b.JoinAddr()) && slices.ContainsFunc(all, func(h *inventory.Host) bool { return !onlyHere(h.Endpoint.String()) }) {
		ctl.Journal.Note(status.Bad, "agents of other computers cannot join at %s: see -join and -advertise", b.JoinAddr())
	}
	looking, stop := context.WithTimeout(context.Background(), lookTimeout)
	var looked sync.WaitGroup
	looked.Go(func() { // it may take as long as the slowest host does
		for _, found := range findClaims(looking, b.Pool(), all, nil) {
			if found.err == nil && found.claim.About.Run != record.Run {
				ctl.Journal.Note(status.Bad, "%s; sshfleet claims tells more", found)
			}
		}
	})
	begun = true
	driveErr := ctl.Drive(watcher, c.interrupts, c.errs, func() { stop(); looked.Wait(); showed() })
	return errors.Join(driveErr, ctl.goodbye(c, dir))
}

// onlyHere reports whether an address means this computer and no other.
func onlyHere(address string) bool {
	host, _, err := net.SplitHostPort(address)
	ip := net.ParseIP(host)
	return err == nil && (host == "localhost" || ip != nil && ip.IsLoopback())
}

// inventoryPath returns how an inventory is named from anywhere, and in hints.
func inventoryPath(path string) (string, error) {
	if path == defaultHosts {
		return "", nil // it is not told, so it must be the one here
	}
	return filepath.Abs(path)
}

// recordPlaces returns what puts each host on the record of a run before the run
// has a claim there: drain has to look there, whatever inventory it is given.
func recordPlaces(dir runs.Dir, record runs.Record) func(*inventory.Host) error {
	var mu sync.Mutex
	record.Places = make(map[string]string)
	return func(h *inventory.Host) error {
		mu.Lock()
		defer mu.Unlock()
		if record.Places[h.Name] != "" {
			return nil
		}
		record.Places[h.Name] = h.Place()
		if err := dir.Write(record); err != nil {
			delete(record.Places, h.Name)
			return err
		}
		return nil
	}
}

// makeSecrets returns the directory of secrets, with a join token in it.
func makeSecrets(dir string) (string, error) {
	secrets := filepath.Join(dir, "secrets")
	if err := os.MkdirAll(secrets, 0o700); err != nil {
		return "", err
	}
	err := atomicfile.Create(filepath.Join(secrets, backend.DefaultTokenRef), []byte(rand.Text()+rand.Text()+"\n"))
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	return secrets, nil
}

// goodbye says what is still held, and takes the run off the record if nothing
// is.
func (ctl *controller) goodbye(c *command, dir runs.Dir) error {
	held := ctl.Host.Held()
	if len(held) == 0 {
		fmt.Fprintf(c.out, "Nothing is held: run %s is over.\n", ctl.Run)
		return dir.Forget(ctl.Run)
	}
	fmt.Fprintf(c.out, "Stopped driving run %s. %d slots hold a host, or may:\n", ctl.Run, len(held))
	for _, slot := range held {
		fmt.Fprintf(c.out, "  %s\n", view.Printable(slot.String()))
	}
	fmt.Fprintf(c.out, "Give them back with: %s\n", ctl.GiveBack)
	return nil
}

// Break refuses: these hosts are somebody's.
func (ctl *controller) Break(string, uint64) (string, error) {
	return "", errors.New("sshfleet: hosts of one's own are not broken on purpose")
}
