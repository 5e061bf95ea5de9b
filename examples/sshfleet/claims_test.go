//go:build linux

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
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
	return p.doWith("hosts.yaml", args...)
}

// doWith does it with another inventory.
func (p *place) doWith(inventory string, args ...string) (out, errs string, status int) {
	p.t.Helper()
	file, err := os.CreateTemp(p.dir, "out")
	require.NoError(p.t, err)
	defer file.Close()
	var complaints bytes.Buffer
	args = append(args, "-dir", filepath.Join(p.dir, "d"), "-hosts", filepath.Join(p.dir, inventory))
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

// A run is forgotten only once all hosts that it has used were looked at: with an
// inventory that has them, where they were, and their directories of claims.
func TestDrainLooksWhereTheRunWas(t *testing.T) {
	t.Parallel()
	p := newPlace(t, "a", "b")
	dir, record := p.begin()
	p.pool.Close()
	p.pool = hosts.NewPool(hosts.Config{Claiming: recordPlaces(dir, record)})
	token := p.claim(0, record.Run)
	a, b := p.servers[0], p.servers[1]
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(p.dir, name), []byte("hosts:\n"+text), 0o600))
	}
	write("others.yaml", b.Entry())
	write("elsewhere.yaml", strings.Replace(a.Entry(), "name: a,", "name: a, dir: elsewhere,", 1))
	for inventory, complaint := range map[string]string{
		"others.yaml":    "has used host a at " + a.Host().Place() + ", which is not in this inventory",
		"elsewhere.yaml": "has used host a at " + a.Host().Place() + ", and in this inventory it is at ",
	} {
		_, errs, code := p.doWith(inventory, "drain")
		require.Equal(t, exitFailed, code)
		require.Contains(t, errs, complaint)
		require.NotContains(t, errs, "host b")
	}
	require.NoError(t, os.Rename(a.Dir(), a.Dir()+".away"))
	for _, command := range []string{"drain", "claims"} {
		_, errs, code := p.do(command)
		require.Equal(t, exitFailed, code)
		require.Contains(t, errs, "host a has no directory of claims in .swactor, where there was one")
	}
	_, errs, code := p.do("drain", "-gone", "c")
	require.Equal(t, exitFailed, code)
	require.Contains(t, errs, `there is no host "c"`)
	records, err := dir.List()
	require.NoError(t, err)
	require.Len(t, records, 1)

	out, errs, code := p.doWith("others.yaml", "drain", "-gone", "a")
	require.Zero(t, code, errs)
	require.Contains(t, out, "is left on the hosts, but for what is on a.")
	records, err = dir.List()
	require.NoError(t, err)
	require.Empty(t, records)
	require.False(t, p.cleaned(0))
	require.NoError(t, os.Rename(a.Dir()+".away", a.Dir()))
	require.NoError(t, p.pool.End(t.Context(), a.Host(), token, true))
}

// A host that cannot be put on record gets no claim.
func TestNoClaimWithoutARecord(t *testing.T) {
	t.Parallel()
	p := newPlace(t, "a")
	dir, record := p.begin()
	require.NoError(t, os.RemoveAll(string(dir)))
	pool := hosts.NewPool(hosts.Config{Claiming: recordPlaces(dir, record)})
	defer pool.Close()
	h := p.servers[0].Host()
	_, err := pool.Make(t.Context(), h, provisioning.ExternalKey{Run: record.Run, Node: "w-0", Attempt: 1}, "")
	require.ErrorContains(t, err, "no claim was made")
	require.NotErrorIs(t, err, hosts.ErrInDoubt)
	claims, _, err := pool.List(t.Context(), h)
	require.NoError(t, err)
	require.Empty(t, claims)
}

// What is printed to be pasted says which inventory and directory it means.
func TestHints(t *testing.T) {
	for want, c := range map[string]struct{ dir, hosts string }{
		"sshfleet release a k":                              {defaultDir, defaultHosts},
		"sshfleet release -dir d -hosts /x/hosts.yaml a k":  {"d", "/x/hosts.yaml"},
		"sshfleet release -hosts '/it'\\''s here.yaml' a k": {defaultDir, "/it's here.yaml"},
	} {
		require.Equal(t, want, (&command{dir: c.dir}).hint("release", c.hosts, "a", "k"))
	}
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
	require.Regexp(t, `(?m)^b +held +w-0 +2 .* nobody here remembers it; sshfleet release -dir \S+ -hosts \S+ b `+lost+` ends it$`, out)
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
