//go:build unix

package inventory

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/shapefile"
)

// place is a directory with a private key, "key".
type place struct {
	t   *testing.T
	dir string
}

func newPlace(t *testing.T) place {
	p := place{t, t.TempDir()}
	_, private, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	for name, passphrase := range map[string]string{"key": "", "locked": "secret"} {
		block, err := ssh.MarshalPrivateKey(private, "")
		if passphrase != "" {
			block, err = ssh.MarshalPrivateKeyWithPassphrase(private, "", []byte(passphrase))
		}
		require.NoError(t, err)
		p.write(name, string(pem.EncodeToMemory(block)))
	}
	p.write("rubbish", "hunter2")
	p.write("open", "hunter2")
	require.NoError(t, os.Chmod(filepath.Join(p.dir, "open"), 0o644))
	return p
}

func (p place) write(name, text string) string {
	p.t.Helper()
	path := filepath.Join(p.dir, name)
	require.NoError(p.t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func hostKey(t *testing.T) ssh.PublicKey {
	public, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	key, err := ssh.NewPublicKey(public)
	require.NoError(t, err)
	return key
}

func authorized(key ssh.PublicKey) string {
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))
}

func TestRead(t *testing.T) {
	p := newPlace(t)
	pinned, known, other, revoked := hostKey(t), hostKey(t), hostKey(t), hostKey(t)
	p.write("known_hosts", strings.Join([]string{
		knownhosts.Line([]string{"[192.0.2.1]:2222"}, known),
		knownhosts.Line([]string{"192.0.2.1"}, other), // of another port
		"# hashed, as OpenSSH does it",
		knownhosts.HashHostname("b.example") + " " + authorized(known),
		"@revoked * " + authorized(revoked),
	}, "\n")+"\n")
	hosts, err := Read(p.write("hosts.yaml", `
knownHosts: known_hosts
hosts:
  - {host: b.example, user: u, key: key, dir: /var/lib/x}
  - name: a
    host: 192.0.2.1
    port: 2222
    user: u
    key: `+filepath.Join(p.dir, "key")+`
    labels: {zone: "1.10"}
  - {name: c, host: 192.0.2.9, user: u, key: key, hostKey: `+authorized(pinned)+`}
`))
	require.NoError(t, err)
	require.Len(t, hosts, 3)
	a, b, c := hosts[0], hosts[1], hosts[2]
	require.Equal(t, "a", a.Name)
	require.Equal(t, provisioning.SSHEndpoint{Host: "192.0.2.1", Port: 2222}, a.Endpoint)
	require.Equal(t, map[string]string{"zone": "1.10"}, a.Labels)
	require.Equal(t, DefaultDir, a.Dir)
	require.Equal(t, "b.example:22", b.Name)
	require.Equal(t, "/var/lib/x", b.Dir)
	for h, key := range map[*Host]ssh.PublicKey{a: known, b: known, c: pinned} {
		require.Len(t, h.HostKeys, 1)
		require.Equal(t, key.Marshal(), h.HostKeys[0].Marshal())
	}
	require.True(t, a.Has(nil))
	require.True(t, a.Has(map[string]string{"zone": "1.10"}))
	require.False(t, a.Has(map[string]string{"zone": "1.1"}))
	require.False(t, b.Has(map[string]string{"zone": ""}))
}

// Whatever is wrong is told, all at once, with the line where it stands and with
// nothing of a key.
func TestReadTellsEveryFault(t *testing.T) {
	p := newPlace(t)
	revoked := hostKey(t)
	p.write("known_hosts", knownhosts.Line([]string{"192.0.2.3"}, revoked)+"\n@revoked * "+authorized(revoked)+"\n")
	path := p.write("hosts.yaml", `knownHosts: known_hosts
hosts:
  - {host: 192.0.2.1, user: u, key: key, hostKey: ssh-ed25519 AAAA}
  - {host: 192.0.2.2, user: u, key: key}
  - {host: 192.0.2.3, user: u, key: key}
  - {host: h, port: 65536, key: missing, hostKey: `+authorized(hostKey(t))+`}
  - {host: i, user: u, key: open, pasword: hunter2, hostKey: `+authorized(hostKey(t))+`}
  - {host: j, user: u, key: locked, hostKey: `+authorized(hostKey(t))+`}
  - {host: k, user: u, key: rubbish, hostKey: `+authorized(hostKey(t))+`}
  - {host: k, user: u, key: key, hostKey: `+authorized(hostKey(t))+`}
  - {name: k@, host: k, port: 23, user: u, key: key, hostKey: `+authorized(hostKey(t))+`}
  - {name: "i:22", host: m, user: u, key: key, hostKey: `+authorized(hostKey(t))+`}
  - {host: n, port: 0, user: "", key: pipe, hostKey: `+authorized(hostKey(t))+`}
  - {user: u, key: key}
  - {host: "", user: u, key: key}
`)
	require.NoError(t, syscall.Mkfifo(filepath.Join(p.dir, "pipe"), 0o600))
	_, err := Read(path)
	require.ErrorIs(t, err, shapefile.ErrInvalid)
	got := strings.ReplaceAll(err.Error(), p.dir+"/", "")
	require.Equal(t, strings.TrimSpace(`
hosts.yaml:3: hosts[0].hostKey: is no public key as in a .pub file
hosts.yaml:4: hosts[1].host: the known hosts have no key of 192.0.2.2:22; ssh-keyscan -p 22 192.0.2.2 shows the one to compare
hosts.yaml:5: hosts[2].host: the known hosts have no key of 192.0.2.3:22; ssh-keyscan -p 22 192.0.2.3 shows the one to compare
hosts.yaml:6: hosts[3].user: is missing
hosts.yaml:6: hosts[3].port: must be from 1 to 65535
hosts.yaml:6: hosts[3].key: stat missing: no such file or directory
hosts.yaml:7: hosts[4].pasword: is not a known field
hosts.yaml:7: hosts[4].key: open is open to others than its owner
hosts.yaml:8: hosts[5].key: locked has a passphrase, which nobody is there to type
hosts.yaml:9: hosts[6].key: rubbish is no private key
hosts.yaml:10: hosts[7].name: another host is called "k:22"
hosts.yaml:10: hosts[7].host: another entry is for the same directory of k:22
hosts.yaml:11: hosts[8].name: must hold no space, control character or @
hosts.yaml:12: hosts[9].name: another host is called "i:22"
hosts.yaml:13: hosts[10].user: is empty
hosts.yaml:13: hosts[10].port: must be from 1 to 65535
hosts.yaml:13: hosts[10].key: pipe is no regular file
hosts.yaml:14: hosts[11].host: is missing
hosts.yaml:15: hosts[12].host: is empty
`), got)
	require.NotContains(t, got, "hunter2")
}

func TestReadNeedsHostKeys(t *testing.T) {
	p := newPlace(t)
	_, err := Read(p.write("hosts.yaml", "hosts:\n  - {host: h, user: u, key: key}\n"))
	require.ErrorContains(t, err, "hosts.yaml:2: hosts[0]: has no hostKey, and there is no knownHosts")
	_, err = Read(p.write("hosts.yaml", "knownHosts: missing\nhosts: []\n"))
	require.ErrorContains(t, err, "hosts.yaml:1: knownHosts: stat ")
	require.ErrorContains(t, err, "hosts.yaml:2: hosts: lists none")
	require.NoError(t, syscall.Mkfifo(filepath.Join(p.dir, "pipe"), 0o600))
	_, err = Read(p.write("hosts.yaml", "knownHosts: pipe\nhosts: []\n"))
	require.ErrorContains(t, err, "pipe is no regular file")
	_, err = Read(p.write("hosts.yaml", "knownHosts: x\n"))
	require.ErrorContains(t, err, "hosts: is missing")
}

// The README names every field there is.
func TestReadmeNamesEveryField(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	for typ, prefix := range map[reflect.Type]string{reflect.TypeFor[document](): "", reflect.TypeFor[host](): "hosts[]."} {
		for i := range typ.NumField() {
			require.Contains(t, string(readme), "`"+prefix+typ.Field(i).Tag.Get("json")+"`")
		}
	}
}
