//go:build linux

package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/swactor/provisioning/examples/localfleet/control"
	"github.com/swactor/provisioning/examples/localfleet/internal/child"
	"github.com/swactor/provisioning/examples/localfleet/leftover"
	"github.com/swactor/provisioning/examples/localfleet/runs"
	"github.com/swactor/provisioning/examples/localfleet/status"
)

// asProgram makes the test program be this program.
const asProgram = "LOCALFLEET_TEST_PROGRAM"

func TestMain(m *testing.M) {
	if status, ok := child.Main(os.Args); ok { // a machine that a test has started, or its agent
		os.Exit(status)
	}
	if os.Getenv(asProgram) != "" {
		interrupts := make(chan os.Signal, 2)
		signal.Notify(interrupts, os.Interrupt, syscall.SIGTERM)
		os.Exit(run(os.Args[1:], os.Stdout, os.Stderr, interrupts))
	}
	os.Exit(leftover.Run(m))
}

// patience is much longer than anything takes, on a slow computer too.
const patience = time.Minute

// place is the directory of a fleet and its shape file. When the test ends
// everything in it is given back, and it is seen to that nothing is left.
type place struct {
	t     *testing.T
	dir   string
	shape string
}

func newPlace(t *testing.T, shape string) *place {
	dir, err := os.MkdirTemp("", "fleet") // shorter than t.TempDir: the path of a socket
	require.NoError(t, err)
	p := &place{t: t, dir: filepath.Join(dir, "d"), shape: filepath.Join(dir, "fleet.yaml")}
	p.write(shape)
	t.Cleanup(func() {
		defer p.kill() // what a drain that failed has left
		out, errs, code := p.do("drain")
		require.Zero(t, code, "%s%s", out, errs)
		require.Contains(t, out, p.dir)
		require.Empty(t, p.machines())
		machines, err := os.ReadDir(filepath.Join(p.dir, "machines"))
		if !errors.Is(err, os.ErrNotExist) {
			require.NoError(t, err)
		}
		require.Empty(t, machines)
		require.NoError(t, os.RemoveAll(dir))
	})
	return p
}

func (p *place) write(shape string) {
	p.t.Helper()
	require.NoError(p.t, os.WriteFile(p.shape, []byte(shape), 0o600))
}

// find returns those of the files of that name in /proc that hold a word, by
// process. A space stands there between two strings.
func (p *place) find(name, word string) map[int]string {
	p.t.Helper()
	entries, err := os.ReadDir("/proc")
	require.NoError(p.t, err)
	found := make(map[int]string)
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue // not a process
		}
		content, err := os.ReadFile(filepath.Join("/proc", entry.Name(), name))
		if text := " " + strings.ReplaceAll(string(content), "\x00", " "); err == nil && strings.Contains(text, word) {
			found[pid] = text
		}
	}
	return found
}

// machines lists the numbers and command lines of all machines of this place, by
// asking the system. A machine heads a process group; in a group of another's
// there is what a machine has just forked, which looks like it until its exec.
func (p *place) machines() map[int]string {
	p.t.Helper()
	found := p.find("cmdline", " machine "+p.dir+"/machines/")
	maps.DeleteFunc(found, func(pid int, _ string) bool {
		group, err := syscall.Getpgid(pid)
		return err != nil || group != pid
	})
	return found
}

// agents counts the living agents of a run, the same way.
func (p *place) agents(run string) int {
	p.t.Helper()
	return len(p.find("environ", " SWACTOR_RUN="+run+" "))
}

func (p *place) kill() {
	for pid := range p.machines() {
		syscall.Kill(-pid, syscall.SIGKILL)
	}
}

func (p *place) command(args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], append(args, "-dir", p.dir)...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	return cmd
}

// do runs a command to its end.
func (p *place) do(args ...string) (out, errs string, code int) {
	p.t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := p.command(args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	require.NoError(p.t, cmd.Start())
	timer := time.AfterFunc(3*patience, func() { cmd.Process.Kill() })
	defer timer.Stop()
	if err := cmd.Wait(); err != nil {
		exit, ok := errors.AsType[*exec.ExitError](err)
		require.True(p.t, ok, "%v", err)
		code = exit.ExitCode()
	}
	return stdout.String(), stderr.String(), code
}

// ok runs a command that must succeed and returns what it printed.
func (p *place) ok(args ...string) string {
	p.t.Helper()
	out, errs, code := p.do(args...)
	require.Zero(p.t, code, "%v: %s%s", args, out, errs)
	return out
}

// running is a "localfleet up".
type running struct {
	*place
	cmd   *exec.Cmd
	ended chan struct{}

	mu   sync.Mutex
	text strings.Builder
	more chan struct{} // closed at the next line
}

// up starts a controller and waits until it drives.
func (p *place) up(args ...string) *running {
	p.t.Helper()
	c := p.begin(args...)
	out, err := c.cmd.StdoutPipe()
	require.NoError(p.t, err)
	errs, err := c.cmd.StderrPipe()
	require.NoError(p.t, err)
	c.start()
	var reading sync.WaitGroup
	for _, pipe := range []io.Reader{out, errs} {
		reading.Go(func() { c.read(pipe) })
	}
	go func() {
		reading.Wait()
		c.cmd.Wait() // its status is in ProcessState
		close(c.ended)
	}()
	c.await("run fleet-")
	return c
}

func (p *place) begin(args ...string) *running {
	return &running{place: p, cmd: p.command(append([]string{"up", "-plain", "-shape", p.shape, "-boot-delay", "100ms"}, args...)...),
		ended: make(chan struct{}), more: make(chan struct{})}
}

func (c *running) start() {
	c.t.Helper()
	require.NoError(c.t, c.cmd.Start())
	c.t.Cleanup(func() {
		c.cmd.Process.Kill()
		<-c.ended
	})
}

func (c *running) read(pipe io.Reader) {
	lines := bufio.NewScanner(pipe)
	for lines.Scan() {
		c.mu.Lock()
		c.text.WriteString(lines.Text() + "\n")
		close(c.more)
		c.more = make(chan struct{})
		c.mu.Unlock()
	}
}

func (c *running) output() (string, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.text.String(), c.more
}

// await waits until the controller has printed something.
func (c *running) await(what string) {
	c.t.Helper()
	deadline := time.After(patience)
	for {
		text, more := c.output()
		if strings.Contains(text, what) {
			return
		}
		select {
		case <-more:
		case <-c.ended:
			text, _ = c.output()
			require.Contains(c.t, text, what, "it ended without saying so")
			return
		case <-deadline:
			require.Fail(c.t, "it never said "+what, text)
		}
	}
}

// status waits until the controller's status is as wanted.
func (c *running) status(what string, wanted func(status.Status) bool) status.Status {
	c.t.Helper()
	client := control.NewClient(c.dir)
	var last status.Status
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		s, err := client.Status(c.t.Context())
		require.NoError(c.t, err)
		if last = s; wanted(s) {
			return s
		}
	}
	require.Fail(c.t, "never "+what, "%+v", last)
	return last
}

func (c *running) converged(generation uint64, nodes int) status.Status {
	c.t.Helper()
	return c.status("converged", func(s status.Status) bool {
		return s.Converged && s.Generation == generation && s.Ready == nodes && len(s.Slots) == nodes
	})
}

func (c *running) signal(s os.Signal) { require.NoError(c.t, c.cmd.Process.Signal(s)) }

// end waits for the end and returns the exit status.
func (c *running) end() int {
	c.t.Helper()
	select {
	case <-c.ended:
	case <-time.After(patience):
		text, _ := c.output()
		require.Fail(c.t, "it does not end", text)
	}
	return c.cmd.ProcessState.ExitCode()
}

func wish(groups ...string) string {
	if len(groups) == 0 {
		return "groups: []\n"
	}
	return "groups:\n" + strings.Join(groups, "")
}

func workers(count int, image string) string {
	return fmt.Sprintf("- {groupId: worker, count: %d, shape: {image: %q}}\n", count, image)
}

const trainers = "- {groupId: trainer, role: trainer, count: 2, shape: {image: \"trainer:v1\"}}\n"

// The whole life: up, asked, edited, drained.
func TestLifeOfAFleet(t *testing.T) {
	p := newPlace(t, wish(trainers, workers(3, "v1")))
	c := p.up("-http", "127.0.0.1:0")
	c.converged(1, 5)
	require.Len(t, p.machines(), 5)

	require.Contains(t, p.ok("status"), "generation 1: converged, 5 of 5 ready, 5 with a machine, 100 % done")
	require.Regexp(t, `(?m)^worker-2 +#\d+ +Dormant +ready$`, p.ok("status"))
	require.Regexp(t, `(?s)^worker-1: ready \[R11 steady\].*image +v1\n.*endpoint +127\.0\.0\.1:\d+\n.*agent +swactor-`, p.ok("explain", "worker-1"))
	_, errs, code := p.do("explain", "worker-3")
	require.Equal(t, exitFailed, code)
	require.Equal(t, "fleet: there is no slot \"worker-3\"\n", errs)
	require.Contains(t, p.ok("plan"), "The next pass towards generation 1: 0 steps, 5 slots wait or are as wished.")

	_, errs, code = p.do("up", "-shape", p.shape)
	require.Equal(t, exitFailed, code)
	require.Equal(t, "fleet: a controller is running in this directory: "+p.dir+"\n", errs)

	// What an edit would do, and then does.
	other := filepath.Join(filepath.Dir(p.shape), "other.json")
	require.NoError(t, os.WriteFile(other, []byte(`{"groups": [{"groupId": "worker", "count": 4, "shape": {"image": "v2"}}]}`), 0o600))
	require.Regexp(t, `(?s)generation 2: 6 steps, 0 slots.*trainer-0 +BeginDelete.*worker-0 +BeginDelete.*worker-3 +Insert attempt 6 \(R0 insert: `, p.ok("plan", "-shape", other))
	c.converged(1, 5) // asking changed nothing
	p.write(wish(workers(4, "v2")))
	c.converged(2, 4)
	require.Len(t, p.machines(), 4)

	// The same in other words is no change.
	p.write("# told in another way\n" + wish("- {count: 4, groupId: \"worker\", shape: {image: v2}}\n"))
	c.status("read again", func(s status.Status) bool {
		return strings.Contains(metrics(t, c), `localfleet_reloads_total{result="accepted"} 3`)
	})
	c.converged(2, 4)

	out := p.ok("drain")
	require.Contains(t, out, "Nothing is left in "+p.dir)
	require.Equal(t, exitOK, c.end())
	c.await("Nothing is held: run fleet-")
	require.Empty(t, p.machines())
	records, err := runs.Dir(p.dir).List()
	require.NoError(t, err)
	require.Empty(t, records)
	_, errs, code = p.do("status")
	require.Equal(t, exitFailed, code)
	require.Equal(t, "fleet: no controller is running in this directory\n", errs)
}

var pageAt = regexp.MustCompile(`page at (http://\S+)`)

func metrics(t *testing.T, c *running) string {
	text, _ := c.output()
	found := pageAt.FindStringSubmatch(text)
	require.NotNil(t, found, text)
	response, err := http.Get(found[1] + "metrics")
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return string(body)
}

// From nothing to 6, to 10, to 4, and another image: each time there are exactly
// the machines that are wished for, and what need not change stays.
func TestScaleAndRoll(t *testing.T) {
	p := newPlace(t, wish(workers(6, "v1")))
	c := p.up()
	generation := uint64(0)
	reach := func(nodes int) map[int]string {
		t.Helper()
		generation++
		s := c.converged(generation, nodes)
		machines := p.machines()
		require.Len(t, machines, nodes)
		require.Equal(t, nodes, p.agents(s.Run))
		return machines
	}
	six := reach(6)
	p.write(wish(workers(10, "v1")))
	ten := reach(10)
	for pid := range six {
		require.Contains(t, ten, pid, "growing replaces nothing")
	}
	p.write(wish(workers(4, "v1")))
	four := reach(4)
	for pid := range four {
		require.Contains(t, six, pid, "the highest indices go")
	}
	p.write(wish(workers(4, "v2")))
	for pid := range reach(4) {
		require.NotContains(t, four, pid, "another image is another machine")
	}
	p.ok("drain")
	require.Equal(t, exitOK, c.end())
}

// A bad edit is reported with its line, and the old wish stays.
func TestBadEditKeepsTheWish(t *testing.T) {
	p := newPlace(t, wish(workers(2, "v1")))
	c := p.up()
	c.converged(1, 2)
	p.write(wish("- {groupId: worker, cuont: 9}\n"))
	s := c.status("complaining", func(s status.Status) bool { return s.FileProblem != "" })
	require.Equal(t, p.shape+":2: groups[0].cuont: is not a known field\n"+p.shape+":2: groups[0].count: is missing; write 0 for an empty group", s.FileProblem)
	c.await("the shape file is refused, the old wish stays: " + p.shape + ":2: groups[0].cuont: is not a known field")
	require.Contains(t, p.ok("status"), "groups[0].cuont: is not a known field")
	c.converged(1, 2)
	require.NoError(t, os.Remove(p.shape))
	c.status("complaining of another thing", func(s status.Status) bool { return strings.Contains(s.FileProblem, "no such file") })
	c.converged(1, 2)
	// A look that waited would stop the driving, and nobody would hear Ctrl-C.
	require.NoError(t, unix.Mkfifo(p.shape, 0o600))
	c.status("complaining of a pipe", func(s status.Status) bool { return strings.Contains(s.FileProblem, "is not a regular file") })
	c.converged(1, 2)
	require.NoError(t, os.Remove(p.shape))
	p.write(wish(workers(1, "v1")))
	require.Empty(t, c.converged(2, 1).FileProblem)
}

// Interrupted in the middle of creates it forgets nothing: what it holds is
// told, found by the token of its run, and given back by drain.
func TestInterruptForgetsNothing(t *testing.T) {
	p := newPlace(t, wish(workers(8, "v1")))
	c := p.up()
	c.await("calls CreateLease")
	c.signal(os.Interrupt)
	require.Equal(t, exitOK, c.end())
	text, _ := c.output()
	require.Contains(t, text, "interrupt: stopping")
	records, err := runs.Dir(p.dir).List()
	require.NoError(t, err)
	if len(records) == 0 { // so fast that nothing was bought
		require.Contains(t, text, "Nothing is held: run fleet-")
		return
	}
	require.Len(t, records, 1)
	require.Contains(t, text, "Give them back with: localfleet drain -dir "+p.dir)
	_, errs, code := p.do("status")
	require.Equal(t, exitFailed, code)
	require.Contains(t, errs, "1 runs on record may have left machines, localfleet drain -dir "+p.dir+" gives them back")

	require.Contains(t, p.ok("drain"), "Nothing is left in "+p.dir)
	require.Empty(t, p.machines())
}

// Machines of an interrupted controller live on, are told of by the next one,
// which has its own, and go with drain.
func TestMachinesOutliveTheController(t *testing.T) {
	p := newPlace(t, wish(workers(2, "v1")))
	first := p.up()
	run := first.converged(1, 2).Run
	first.signal(syscall.SIGTERM)
	require.Equal(t, exitOK, first.end())
	first.await("worker-1 attempt 2 holds lease ")
	require.Len(t, p.machines(), 2)

	second := p.up()
	second.await("run " + run + ", which began ")
	second.await("has left 2 machines; localfleet drain gives them back")
	require.NotEqual(t, run, second.converged(1, 2).Run)
	require.Len(t, p.machines(), 4)
	out := p.ok("drain")
	require.Equal(t, 2, strings.Count(out, "destroyed "+run+"-worker-"), out)
	require.Equal(t, exitOK, second.end())
	require.Empty(t, p.machines())
}

// A controller that is killed leaves its run on record.
func TestKilledControllerIsFoundByItsRun(t *testing.T) {
	for _, moment := range []string{"calls CreateLease", "LeaseRequested -> LeaseCreated", "calls StartBootstrap"} {
		t.Run(moment, func(t *testing.T) {
			p := newPlace(t, wish(workers(6, "v1")))
			first := p.up()
			first.await(moment)
			first.signal(syscall.SIGKILL)
			require.Equal(t, -1, first.end())
			records, err := runs.Dir(p.dir).List()
			require.NoError(t, err)
			require.Len(t, records, 1)

			second := p.up()
			if len(p.machines()) > 6 {
				second.await("run " + string(records[0].Run) + ", which began ")
			}
			second.converged(1, 6)
			require.Contains(t, p.ok("drain"), "Nothing is left in "+p.dir)
			require.Equal(t, exitOK, second.end())
			require.Empty(t, p.machines())
		})
	}
}

// The second Ctrl-C does not wait, even where the first one hangs: here on
// whoever should read the output and does not.
func TestSecondInterruptLeavesAtOnce(t *testing.T) {
	p := newPlace(t, wish(workers(12, "v1")))
	reader, writer, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { reader.Close() })
	_, err = unix.FcntlInt(writer.Fd(), unix.F_SETPIPE_SZ, 4096)
	require.NoError(t, err)
	c := p.begin()
	c.cmd.Stdout = writer
	c.start()
	require.NoError(t, writer.Close())
	go func() {
		c.cmd.Wait()
		close(c.ended)
	}()
	require.Eventually(t, func() bool {
		s, err := control.NewClient(p.dir).Status(t.Context())
		return err == nil && s.Converged
	}, patience, 20*time.Millisecond)
	c.signal(os.Interrupt)
	c.status("stopping", func(s status.Status) bool { return s.Ended == "interrupt" })
	c.signal(os.Interrupt)
	require.Equal(t, exitAtOnce, c.end())
	require.Len(t, p.machines(), 12)
	require.Contains(t, p.ok("drain"), "Nothing is left in "+p.dir)
}

// Everything is broken at random for a while, and heals.
func TestChaosHeals(t *testing.T) {
	lasting, nodes := time.Minute, 8
	if testing.Short() {
		lasting, nodes = 5*time.Second, 3
	}
	p := newPlace(t, wish(workers(nodes, "v1")))
	c := p.up()
	c.converged(1, nodes)
	out := p.ok("chaos", "-for", lasting.String(), "-every", "500ms", "-seed", "1")
	t.Log(out)
	for _, what := range []string{"killed the machine of worker-", "killed the agent of worker-", "cut the connection to worker-"} {
		require.Contains(t, out, what)
	}
	// What was broken last is not noticed yet: the processes themselves have to
	// be there too.
	quiet := time.Now()
	var s status.Status
	require.Eventually(t, func() bool {
		s = c.converged(1, nodes)
		return len(p.machines()) == nodes && p.agents(s.Run) == nodes
	}, patience, 100*time.Millisecond)
	t.Logf("healed %v after the last break", time.Since(quiet))
	require.NotZero(t, s.Failed)
	require.Len(t, p.machines(), nodes)
	machines, err := os.ReadDir(filepath.Join(p.dir, "machines"))
	require.NoError(t, err)
	require.Len(t, machines, nodes)
	p.ok("drain")
	require.Equal(t, exitOK, c.end())
}

func TestDrainOfAnEmptyPlace(t *testing.T) {
	p := newPlace(t, wish())
	require.Equal(t, "There is no fleet in "+p.dir+".\n", p.ok("drain"))
	require.NoDirExists(t, p.dir)

	// Somebody's directory, by a slip in -dir: it stays as it was.
	require.NoError(t, os.Mkdir(p.dir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(p.dir, "letter"), nil, 0o600))
	require.Equal(t, "There is no fleet in "+p.dir+".\n", p.ok("drain"))
	entries, err := os.ReadDir(p.dir)
	require.NoError(t, err)
	require.Len(t, entries, 1)
}

// Wherever the fleet lives, its machines find their agent.
func TestPlaceWithAnOddName(t *testing.T) {
	p := newPlace(t, wish(workers(1, "v1")))
	p.dir += " ünï 'q' \"$HOME\" 火\n"
	c := p.up()
	c.converged(1, 1)
	p.ok("drain")
	require.Equal(t, exitOK, c.end())
	require.Empty(t, p.machines())

	odd := *p
	odd.dir += ":x" // would be two entries of a PATH
	_, errs, code := odd.do("up", "-shape", p.shape)
	require.Equal(t, exitFailed, code)
	require.Contains(t, errs, "a path with \":\" cannot be in the PATH of machines")
}

func TestPlanNeedsNoController(t *testing.T) {
	p := newPlace(t, wish(workers(2, "v1")))
	require.Equal(t, "No controller is running: this is what a first pass would do.\n"+
		"The next pass towards generation 1: 2 steps, 0 slots wait or are as wished.\n"+
		"worker-0         Insert attempt 1 (R0 insert: a desired slot that is not in the state gets a node and its first attempt)\n"+
		"worker-1         Insert attempt 2 (R0 insert: a desired slot that is not in the state gets a node and its first attempt)\n",
		p.ok("plan", "-shape", p.shape))
	_, errs, code := p.do("plan")
	require.Equal(t, exitFailed, code)
	require.Equal(t, "fleet: no controller is running in this directory\n", errs)
	require.NoDirExists(t, p.dir)
}

func TestExampleFleetIsInOrder(t *testing.T) {
	p := newPlace(t, "")
	out := p.ok("plan", "-shape", "fleet.yaml")
	require.Contains(t, out, "6 steps")
	require.Contains(t, out, "trainer-1")
	require.Contains(t, out, "worker-3")
}

func TestWrongUsage(t *testing.T) {
	p := newPlace(t, "groups: 5\n")
	for _, c := range []struct {
		args []string
		code int
		errs string
	}{
		{[]string{"fly"}, exitUsage, "usage: localfleet COMMAND"},
		{[]string{"help"}, exitOK, "usage: localfleet COMMAND"},
		{[]string{"explain"}, exitUsage, "0 arguments, must be 1"},
		{[]string{"status", "x"}, exitUsage, "1 arguments, must be 0"},
		{[]string{"up", "-nosuch"}, exitUsage, "flag provided but not defined"},
		{[]string{"chaos", "-every", "0s"}, exitUsage, "-every must be positive"},
		{[]string{"up", "-shape", p.shape}, exitFailed, p.shape + ":1: groups: is \"5\", must be a list\n"},
		{[]string{"up", "-shape", p.shape + ".none"}, exitFailed, "no such file"},
		{[]string{"chaos", "-for", "1s"}, exitFailed, "no controller is running"},
	} {
		out, errs, code := p.do(c.args...)
		require.Equal(t, c.code, code, "%v: %s%s", c.args, out, errs)
		require.Contains(t, errs, c.errs, "%v", c.args)
	}
	require.NoDirExists(t, p.dir, "nothing was begun")
	p.write(wish())
	_, errs, code := p.do("up", "-shape", p.shape, "-http", "0.0.0.0:0")
	require.Equal(t, exitFailed, code)
	require.Equal(t, "fleet: the address is not one of loopback: 0.0.0.0:0; -http-public allows it\n", errs)
	records, err := runs.Dir(p.dir).List()
	require.NoError(t, err)
	require.Empty(t, records)
}
