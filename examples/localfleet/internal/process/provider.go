// Package process is a provider whose machines are processes of this computer.
// It needs nothing installed and keeps nothing in memory: what there is stands
// in its directory and in the process table, so that another provider object,
// or another program, finds the machines again by their keys.
//
//	DIR/bin/localfleet          what machines run
//	DIR/machines/TOKEN/         one machine, see [machine.Dir]
//	DIR/machines/.new-*         one that is being ordered, .gone-* one that went
//
// Who a machine belongs to is said three times: by the name of its directory,
// which comes to be by a rename and can come to be only once; by its record in
// there, which is replaced as a whole; and by [osproc.TokenVariable] in the
// environment of all its processes.
//
// Whether a machine lives is said by a lock that it inherits from whoever
// starts it: there is no moment between the order and the machine's end at
// which nobody holds it, and the end, however it comes, releases it. So a
// create that was cut off needs no settle time (B3): whoever asks again sees a
// lock that is held, and waits.
package process

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/atomicfile"
	"github.com/swactor/provisioning/examples/localfleet/internal/machine"
	"github.com/swactor/provisioning/examples/localfleet/internal/osproc"
)

// Kind is the name of this provider in a shape.
const Kind provisioning.ProviderKind = "process"

// How often something is looked at that cannot be waited for, a process that
// is not a child: soon at first, and less and less often.
const firstPoll, lastPoll = 2 * time.Millisecond, 100 * time.Millisecond

// probeTimeout bounds the wait for a banner. On loopback whoever answers does
// so at once.
const probeTimeout = 2 * time.Second

// Prefixes of directories that are no machines.
const fresh, gone = ".new-", ".gone-"

// Config configures a [Provider].
type Config struct {
	// BootDelay is how long a machine takes until its port opens. 0 means
	// no time at all.
	BootDelay time.Duration
	// Lifetime ends machines by themselves. 0 means never.
	Lifetime time.Duration
	// AuthorizedKey may log in to the machines. Required.
	AuthorizedKey ssh.PublicKey
	// Alone says that no other provider works on the directory while this
	// one is opened. Only then is it known that an order which is not locked
	// yet is that of somebody who died, and not a moment old.
	Alone bool
}

// Provider rents processes. All methods are safe for concurrent use, also by
// several providers, in several programs, over one directory.
type Provider struct {
	dir    string
	config Config
	client string // AuthorizedKey as text
}

// State is what is known of a machine.
type State string

// The states.
const (
	Absent    State = "absent"    // there is no such machine
	Starting  State = "starting"  // somebody starts it
	Stillborn State = "stillborn" // whoever wanted to start it is gone, and nothing runs
	Running   State = "running"
	Dead      State = "dead" // it ran, and its process is gone
)

// Machine is one machine as it was found. All but State and Key is unset
// where the machine is absent.
type Machine struct {
	Key       provisioning.ExternalKey
	State     State
	Lease     provisioning.ProviderLeaseID
	Image     string
	User      string
	HostKey   ssh.PublicKey
	PID       int // of its process and its process group; 0 before it runs
	StartedAt time.Time
	Endpoint  *provisioning.SSHEndpoint // nil before it listens
	Dir       machine.Dir
}

// Errors of a [Provider].
var (
	// ErrDead: the machine of this key has died, and is there to be destroyed.
	ErrDead = errors.New("localfleet: the process of the machine is gone")
	// ErrAbsent: there is no machine of this key.
	ErrAbsent = errors.New("localfleet: there is no such machine")
)

// Open returns a provider over a directory, which is made if it is not there. Its
// path gets into the PATH of machines, and must not be one that cannot.
// It sweeps away what orders and destroys that were cut off have left.
func Open(dir string, config Config) (*Provider, error) {
	if config.AuthorizedKey == nil {
		return nil, errors.New("localfleet: a provider needs an authorized key")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if strings.ContainsRune(dir, os.PathListSeparator) {
		return nil, fmt.Errorf("localfleet: a path with %q cannot be in the PATH of machines: %s", string(os.PathListSeparator), dir)
	}
	p := &Provider{dir: dir, config: config, client: strings.TrimSpace(string(ssh.MarshalAuthorizedKey(config.AuthorizedKey)))}
	for _, d := range []string{p.machines(), filepath.Dir(p.program())} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	if err := p.install(); err != nil {
		return nil, fmt.Errorf("localfleet: cannot install the machine's program: %w", err)
	}
	return p, p.sweep()
}

func (p *Provider) machines() string { return filepath.Join(p.dir, "machines") }
func (p *Provider) program() string  { return filepath.Join(p.dir, "bin", "localfleet") }
func (p *Provider) machine(key provisioning.ExternalKey) machine.Dir {
	return machine.Dir(filepath.Join(p.machines(), key.Token())) // B8: the whole token and nothing else
}

// Lease returns the name of the machine of a key. It is made of nothing else
// (B9).
func Lease(key provisioning.ExternalKey) provisioning.ProviderLeaseID {
	return provisioning.ProviderLeaseID(key.Name(63))
}

// install puts this program where machines find it, because they outlive it:
// "go run" deletes its program at the end.
func (p *Provider) install() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	draft := p.program() + "." + rand.Text()
	if os.Link(self, draft) != nil { // on another file system
		if err := copyProgram(self, draft); err != nil {
			return err
		}
	}
	// Not over the old one: a link renamed to another link of the same file
	// is left where it is.
	return errors.Join(os.Rename(draft, p.program()), removeIfThere(draft))
}

func copyProgram(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	target, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o700)
	if err != nil {
		return err
	}
	_, err = io.Copy(target, source)
	return errors.Join(err, target.Close())
}

func removeIfThere(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// sweep removes directories that nobody works on any more.
func (p *Provider) sweep() error {
	entries, err := os.ReadDir(p.machines())
	if err != nil {
		return err
	}
	for _, entry := range entries {
		dir := machine.Dir(filepath.Join(p.machines(), entry.Name()))
		switch {
		case strings.HasPrefix(entry.Name(), gone):
			err = errors.Join(err, os.RemoveAll(string(dir)))
		case strings.HasPrefix(entry.Name(), fresh):
			lock, free, lockErr := takeLock(dir)
			if lockErr == nil && free {
				lockErr = errors.Join(os.RemoveAll(string(dir)), lock.Close())
			}
			if errors.Is(lockErr, fs.ErrNotExist) { // not locked yet
				lockErr = nil
				if p.config.Alone {
					lockErr = os.RemoveAll(string(dir))
				}
			}
			err = errors.Join(err, lockErr)
		}
	}
	return err
}

// Find says what there is of a key.
func (p *Provider) Find(key provisioning.ExternalKey) (m Machine, err error) {
	// A file that is missing from a directory that is there says that the
	// machine came or went during the look. Somebody who keeps coming and
	// going is not what keeps it missing for so long.
	for range 10 {
		m, err = p.look(key)
		if !errors.Is(err, fs.ErrNotExist) {
			break
		}
		if _, gone := os.Stat(string(m.Dir)); errors.Is(gone, fs.ErrNotExist) {
			return m, nil
		}
	}
	return m, err
}

// look is one look at a machine. The error is [fs.ErrNotExist] if a file is
// missing that every machine has.
func (p *Provider) look(key provisioning.ExternalKey) (Machine, error) {
	m := Machine{Key: key, State: Absent, Dir: p.machine(key)}
	var order machine.Order
	if err := atomicfile.ReadJSON(m.Dir.Order(), &order); err != nil {
		return m, err
	}
	if order.Key != key { // 130 bits of a hash: somebody has been at the files
		return m, fmt.Errorf("localfleet: %s holds the machine of %v", m.Dir, order.Key)
	}
	var err error
	if m.HostKey, _, _, _, err = ssh.ParseAuthorizedKey([]byte(order.HostKey)); err != nil {
		return m, fmt.Errorf("localfleet: host key of %s: %w", order.Lease, err)
	}
	// The record before the lock: a machine that was on record and whose lock
	// is free afterwards is dead. The other way round it could have come to
	// life in between.
	var record machine.Record
	err = atomicfile.ReadJSON(m.Dir.Record(), &record)
	recorded := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return m, err
	}
	held, err := isLocked(m.Dir)
	if err != nil {
		return m, err
	}
	switch {
	case recorded && held:
		m.State = Running
	case recorded:
		m.State = Dead
	case held:
		m.State = Starting
	default:
		m.State = Stillborn
	}
	m.Lease, m.Image, m.User = order.Lease, order.Image, order.User
	m.PID, m.StartedAt, m.Endpoint = record.PID, record.StartedAt, record.Endpoint
	return m, nil
}

// List returns what there is, in the order of run, slot name and attempt.
func (p *Provider) List() ([]Machine, error) {
	entries, err := os.ReadDir(p.machines())
	if err != nil {
		return nil, err
	}
	var machines []Machine
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") {
			continue
		}
		var order machine.Order
		err := atomicfile.ReadJSON(machine.Dir(filepath.Join(p.machines(), entry.Name())).Order(), &order)
		if errors.Is(err, fs.ErrNotExist) {
			continue // destroyed meanwhile
		}
		if err != nil {
			return nil, err
		}
		m, err := p.Find(order.Key)
		if err != nil {
			return nil, err
		}
		if m.State != Absent {
			machines = append(machines, m)
		}
	}
	slices.SortFunc(machines, func(a, b Machine) int { return compareKeys(a.Key, b.Key) })
	return machines, nil
}

// Create starts the machine of a key or adopts the one that is there (B1). The
// error is a [provisioning.LeaseLostWith] around [ErrDead] if it has died, and
// [provisioning.ErrNothingToAdopt] if it is not there and adoptOnly is set.
func (p *Provider) Create(ctx context.Context, key provisioning.ExternalKey, image, user string, adoptOnly bool) (Machine, error) {
	launched := false
	for wait := firstPoll; ; {
		if err := ctx.Err(); err != nil {
			return Machine{}, p.cut(launched, err)
		}
		m, err := p.Find(key)
		if err != nil {
			return m, provisioning.Ambiguous(err)
		}
		switch {
		case m.State == Running:
			return m, nil
		case m.State == Dead:
			return m, provisioning.LeaseLostWith(m.Lease, ErrDead) // B11
		case m.State == Starting:
			if err := pause(ctx, &wait); err != nil {
				return m, p.cut(launched, err)
			}
		case m.State == Absent && adoptOnly:
			return m, provisioning.ErrNothingToAdopt // B4
		case m.State == Absent && launched:
			return m, provisioning.Ambiguous(errors.New("localfleet: the machine was destroyed while it was started"))
		case m.State == Absent:
			launched, err = p.order(key, image, user)
			if err != nil {
				return m, err
			}
		case adoptOnly || launched: // stillborn: nobody will start it, or it cannot live
			var said string
			if launched {
				said = lastLine(m.Dir.Console())
			}
			if removed, err := p.remove(m); err != nil || !removed {
				return m, provisioning.Ambiguous(errors.Join(errors.New("localfleet: cannot clear away a machine that never lived"), err))
			}
			if launched {
				return m, provisioning.Definite(fmt.Errorf("localfleet: the machine ended before it lived: %s", said))
			}
			return m, provisioning.ErrNothingToAdopt
		default:
			launched, err = p.revive(m.Dir, key)
			if err != nil {
				return m, err
			}
		}
	}
}

// cut says what a create that ran out of time may have done. Nothing is sent
// over a network, so nothing is under way unless this very call has begun it.
func (p *Provider) cut(launched bool, err error) error {
	if launched {
		return provisioning.Ambiguous(err)
	}
	return provisioning.NotStarted(err)
}

// order claims the key and starts its machine. Somebody else may have been
// faster, which is no error.
func (p *Provider) order(key provisioning.ExternalKey, image, user string) (launched bool, err error) {
	draft, err := os.MkdirTemp(p.machines(), fresh)
	if err != nil {
		return false, provisioning.Definite(err)
	}
	defer func() {
		if removed := os.RemoveAll(draft); removed != nil && err == nil { // does nothing once it is renamed
			err = provisioning.Ambiguous(removed)
		}
	}()
	lock, err := p.draw(machine.Dir(draft), key, image, user)
	if err != nil {
		return false, provisioning.Definite(err)
	}
	defer lock.Close()
	// The claim: rename refuses to replace a directory that is not empty.
	switch err := os.Rename(draft, string(p.machine(key))); {
	case errors.Is(err, fs.ErrExist):
		return false, nil
	case err != nil:
		return false, provisioning.Definite(err)
	}
	return p.launch(p.machine(key), key, lock)
}

// draw writes everything that a machine needs, and locks it.
func (p *Provider) draw(dir machine.Dir, key provisioning.ExternalKey, image, user string) (lock *os.File, err error) {
	lock, err = os.OpenFile(dir.Lock(), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, lock.Close())
		}
	}()
	if ok, err := osproc.TryLock(lock, true); err != nil || !ok {
		return nil, errors.Join(errors.New("localfleet: a fresh lock is held"), err)
	}
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	hostKey, err := ssh.NewPublicKey(public)
	if err != nil {
		return nil, err
	}
	block, err := ssh.MarshalPrivateKey(private, "")
	if err != nil {
		return nil, err
	}
	err = errors.Join(
		os.MkdirAll(dir.Bin(), 0o700),
		os.Symlink(p.program(), filepath.Join(dir.Bin(), filepath.Base(p.program()))),
		os.WriteFile(dir.HostKey(), pem.EncodeToMemory(block), 0o600),
		atomicfile.WriteJSON(dir.Order(), machine.Order{
			Key: key, Lease: Lease(key), Image: image, User: user,
			HostKey:       strings.TrimSpace(string(ssh.MarshalAuthorizedKey(hostKey))),
			AuthorizedKey: p.client, BootDelay: p.config.BootDelay, Lifetime: p.config.Lifetime,
		}))
	return lock, err
}

// revive starts a machine whose first creator did not come to it.
func (p *Provider) revive(dir machine.Dir, key provisioning.ExternalKey) (launched bool, err error) {
	lock, free, err := takeLock(dir)
	if err != nil || !free {
		return false, ambiguousUnlessGone(err)
	}
	defer lock.Close()
	if _, err := os.Stat(dir.Record()); !errors.Is(err, fs.ErrNotExist) {
		return false, ambiguousUnlessGone(err) // somebody was faster
	}
	return p.launch(dir, key, lock)
}

func ambiguousUnlessGone(err error) error {
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return provisioning.Ambiguous(err)
}

// launch starts a machine as nobody's child: the shell between us and it ends
// at once, so that the machine needs no parent and leaves us no zombie. It
// inherits the lock.
func (p *Provider) launch(dir machine.Dir, key provisioning.ExternalKey, lock *os.File) (launched bool, err error) {
	shell := exec.Command("/bin/sh", "-c", `exec </dev/null >>"$0" 2>&1; "$@" &`,
		dir.Console(), p.program(), machine.Command, string(dir))
	shell.Dir = dir.Home()
	// Nothing of ours but the way to programs: an environment holds secrets.
	shell.Env = []string{"PATH=" + os.Getenv("PATH"), osproc.TokenVariable + "=" + key.Token()}
	shell.SysProcAttr = osproc.Detached()
	shell.ExtraFiles = []*os.File{lock} // is machine.LockDescriptor
	if err := shell.Run(); err != nil {
		return true, provisioning.Ambiguous(fmt.Errorf("localfleet: cannot start a machine: %w", err))
	}
	return true, nil
}

// Probe says where the machine answers, nil if it does not yet.
func (p *Provider) Probe(ctx context.Context, key provisioning.ExternalKey) (*provisioning.SSHEndpoint, error) {
	m, err := p.Find(key)
	switch {
	case err != nil:
		return nil, err
	case m.State == Absent:
		return nil, provisioning.LeaseLost(ErrAbsent)
	case m.State == Dead, m.State == Stillborn:
		return nil, provisioning.LeaseLost(ErrDead)
	case m.Endpoint == nil:
		return nil, nil
	}
	if err := readBanner(ctx, m.Endpoint.String()); err != nil {
		return nil, ctx.Err() // nobody answers yet, unless ctx cut the probe short (B7)
	}
	return m.Endpoint, nil
}

// Destroy kills the machine of a key, waits until nothing of it lives, and
// removes its directory. What is absent is destroyed (B5). It returns an error
// that wraps ctx's when the end does not come in time (B6).
//
// No stranger is killed, although numbers of processes are used again: a
// process group is killed only if a member of it carries the token of the
// machine in its environment, and groups cannot be joined from outside of
// their session, of which the machine is the head. Between that look and the
// kill all members would have to die and their number to come round. A group
// that cannot be told (the machine is dead, and what is left of it has no
// environment) is not killed, and not called gone either.
func (p *Provider) Destroy(ctx context.Context, key provisioning.ExternalKey) error {
	for wait := firstPoll; ; {
		m, err := p.Find(key)
		if err != nil || m.State == Absent {
			return err
		}
		left, err := p.kill(m)
		if err != nil {
			return err
		}
		if len(left.Ours) == 0 && left.Unknown == 0 {
			if removed, err := p.remove(m); err != nil || removed {
				return err
			}
		}
		if err := pause(ctx, &wait); err != nil {
			return fmt.Errorf("localfleet: machine %s is still going (%s, %d processes, %d more in doubt): %w",
				m.Lease, m.State, len(left.Ours), left.Unknown, err)
		}
	}
}

// kill kills what lives of a machine and returns what it saw before it did.
func (p *Provider) kill(m Machine) (osproc.Group, error) {
	if m.PID == 0 {
		return osproc.Group{}, nil
	}
	left, err := osproc.Members(m.PID, m.Key.Token())
	if err != nil || len(left.Ours) == 0 {
		return left, err
	}
	return left, osproc.KillGroup(m.PID)
}

// remove removes a machine of which nothing runs. It is false if somebody
// holds the lock, which may be the machine. The directory vanishes as a whole.
func (p *Provider) remove(m Machine) (bool, error) {
	lock, free, err := takeLock(m.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil || !free {
		return false, err
	}
	defer lock.Close()
	if m.PID == 0 {
		if _, err := os.Stat(m.Dir.Record()); err == nil {
			return false, nil // it has lived meanwhile: look again for what it left
		}
	}
	grave := filepath.Join(p.machines(), gone+rand.Text())
	if err := os.Rename(string(m.Dir), grave); err != nil {
		return false, err
	}
	return true, os.RemoveAll(grave)
}

// pause waits, and has the next wait be a longer one.
func pause(ctx context.Context, wait *time.Duration) error {
	select {
	case <-time.After(*wait):
		*wait = min(2**wait, lastPoll)
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
