//go:build linux

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/control"
	"github.com/swactor/provisioning/examples/localfleet/runs"
	"github.com/swactor/provisioning/examples/localfleet/status"
	"github.com/swactor/provisioning/examples/sshfleet/internal/hosts"
	"github.com/swactor/provisioning/examples/sshfleet/internal/sshd"
)

// place is a directory of a controller, an inventory, and hosts.
type place struct {
	t       *testing.T
	dir     string
	servers []*sshd.Server
	pool    *hosts.Pool
}

func newPlace(t *testing.T, names ...string) *place {
	dir, err := os.MkdirTemp("", "p") // shorter than t.TempDir: the path of a socket
	require.NoError(t, err)
	p := &place{t: t, dir: dir, pool: hosts.NewPool(hosts.Config{})}
	inventory := "hosts:\n"
	for _, name := range names {
		s := sshd.Start(t, name)
		p.servers = append(p.servers, s)
		inventory += s.Entry()
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "hosts.yaml"), []byte(inventory), 0o600))
	t.Cleanup(func() {
		p.pool.Close()
		require.NoError(t, os.RemoveAll(dir))
	})
	return p
}

// do runs a command and returns what it printed.
func (p *place) do(args ...string) (out, errs string, status int) {
	p.t.Helper()
	file, err := os.CreateTemp(p.dir, "out")
	require.NoError(p.t, err)
	defer file.Close()
	var complaints bytes.Buffer
	args = append(args, "-dir", filepath.Join(p.dir, "d"), "-hosts", filepath.Join(p.dir, "hosts.yaml"))
	status = run(args, file, &complaints, nil)
	text, err := os.ReadFile(file.Name())
	require.NoError(p.t, err)
	return string(text), complaints.String(), status
}

// begin puts a run on record.
func (p *place) begin() (runs.Dir, runs.Record) {
	p.t.Helper()
	dir := runs.Dir(filepath.Join(p.dir, "d"))
	lock, err := dir.Lock()
	require.NoError(p.t, err)
	record, err := dir.Begin()
	require.NoError(p.t, err)
	require.NoError(p.t, lock.Close())
	return dir, record
}

// claim makes a claim of a run on a host, with a clean-up command that leaves a
// trace.
func (p *place) claim(host int, run provisioning.RunID) (token string) {
	p.t.Helper()
	key := provisioning.ExternalKey{Run: run, Node: "w-0", Attempt: provisioning.NodeAttemptID(host + 1)}
	state, err := p.pool.Make(p.t.Context(), p.servers[host].Host(), key, "touch ~/cleaned")
	require.NoError(p.t, err)
	require.Equal(p.t, hosts.Held, state)
	return key.Token()
}

func (p *place) cleaned(host int) bool {
	_, err := os.Stat(filepath.Join(p.servers[host].Home(), "cleaned"))
	return err == nil
}

// What a controller that was killed has left is given back by drain, when all
// hosts answer; what is somebody else's is not touched.
func TestDrainSweeps(t *testing.T) {
	t.Parallel()
	p := newPlace(t, "a", "b", "c")
	out, errs, code := p.do("drain")
	require.Zero(t, code, errs)
	require.Contains(t, out, "There is no fleet in ")

	dir, record := p.begin()
	p.claim(0, record.Run)
	p.claim(1, record.Run)
	foreign := p.claim(2, "another")
	p.servers[1].Stop()
	out, errs, code = p.do("drain")
	require.Equal(t, exitFailed, code)
	require.Contains(t, out, "given back: a has a claim of w-0, attempt 1, of run "+string(record.Run))
	require.Contains(t, out, "c has a claim of w-0, attempt 3, of run another")
	require.Contains(t, errs, "host b: ")
	require.Contains(t, errs, "the runs stay on record")
	require.True(t, p.cleaned(0))
	records, err := dir.List()
	require.NoError(t, err)
	require.Len(t, records, 1)

	p.servers[1].Start()
	out, errs, code = p.do("drain")
	require.Zero(t, code, errs)
	require.Contains(t, out, "given back: b has a claim")
	require.True(t, p.cleaned(1))
	records, err = dir.List()
	require.NoError(t, err)
	require.Empty(t, records)
	require.False(t, p.cleaned(2))
	_, errs, code = p.do("release", "c", foreign)
	require.Zero(t, code, errs)
}

// driven is a controller of which only the run is asked.
type driven struct {
	control.Controller
	run provisioning.RunID
}

func (d driven) Status() status.Status { return status.Status{Run: string(d.run)} }

func TestClaimsAndRelease(t *testing.T) {
	t.Parallel()
	p := newPlace(t, "a", "b", "c")
	dir, record := p.begin()
	server, err := control.Serve(string(dir), driven{run: record.Run})
	require.NoError(t, err)
	defer server.Close(t.Context())
	ours, lost := p.claim(0, record.Run), p.claim(1, "lost")
	p.servers[2].Stop()
	out, errs, code := p.do("claims")
	require.Equal(t, exitFailed, code)
	require.Regexp(t, `(?m)^a +held +w-0 +1 .* the controller that runs here$`, out)
	require.Regexp(t, `(?m)^b +held +w-0 +2 .* nobody here remembers it; sshfleet release b `+lost+` ends it$`, out)
	require.Regexp(t, `(?m)^c +unknown +the host cannot be asked$`, out)
	require.Contains(t, errs, "host c: ")

	for _, wrong := range []struct {
		host, token, complaint string
	}{
		{"a", ours, "the controller that runs here drives it"},
		{"b", ours, "host b has no claim " + ours},
		{"d", lost, `there is no host "d"`},
		{"c", lost, "host c: "},
	} {
		_, errs, code := p.do("release", wrong.host, wrong.token)
		require.Equal(t, exitFailed, code)
		require.Contains(t, errs, wrong.complaint)
	}
	out, errs, code = p.do("release", "-no-clean-up", "b", lost)
	require.Zero(t, code, errs)
	require.Contains(t, out, "released: b has a claim of w-0, attempt 2, of run lost")
	require.False(t, p.cleaned(1))
	out, _, _ = p.do("claims")
	require.Regexp(t, `(?m)^b +none$`, out)
	require.NoError(t, p.pool.End(t.Context(), p.servers[0].Host(), ours, true))
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, wrong := range [][]string{nil, {"sing"}, {"release", "a"}, {"claims", "-x"}, {"status", "a"}} {
		var errs bytes.Buffer
		require.Equal(t, exitUsage, run(wrong, os.Stdout, &errs, nil), "%v", wrong)
		require.NotEmpty(t, errs.String())
	}
	require.Equal(t, exitOK, run([]string{"help"}, os.Stdout, new(bytes.Buffer), nil))
}

func TestOnlyHere(t *testing.T) {
	for address, want := range map[string]bool{"127.0.0.1:1": true, "[::1]:1": true, "localhost:1": true, "10.0.0.1:1": false, "host:1": false, "": false} {
		require.Equal(t, want, onlyHere(address), address)
	}
}
