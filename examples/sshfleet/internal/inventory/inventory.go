// Package inventory reads which hosts there are, as strictly as a shape file is
// read: a host that is reached in another way than it was meant is somebody
// else's.
package inventory

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/shapefile"
)

// Defaults of a host.
const (
	DefaultPort = 22
	// DefaultDir is where claims are kept on a host. What does not begin with
	// a slash is below the home directory of the user.
	DefaultDir = ".swactor"
)

// Host is one host of an inventory.
type Host struct {
	// Name is unique. Claims are told apart by it.
	Name     string
	Endpoint provisioning.SSHEndpoint
	User     string
	Key      ssh.Signer      // to log in with
	HostKeys []ssh.PublicKey // one of which it has to show
	Dir      string          // see [DefaultDir]
	Labels   map[string]string
}

// Has reports whether the host has all of these labels.
func (h *Host) Has(labels map[string]string) bool {
	for name, value := range labels {
		if is, ok := h.Labels[name]; !ok || is != value {
			return false
		}
	}
	return true
}

// Place says where its claims are kept, to tell it from another host of its name.
func (h *Host) Place() string { return fmt.Sprintf("%s@%v %s", h.User, h.Endpoint, h.Dir) }

// document is what a file may hold.
type document struct {
	KnownHosts string `json:"knownHosts"`
	Hosts      []host `json:"hosts"`
}

type host struct {
	Name    string            `json:"name"`
	Host    string            `json:"host"`
	Port    *int              `json:"port"`
	User    string            `json:"user"`
	Key     string            `json:"key"`
	HostKey string            `json:"hostKey"`
	Dir     string            `json:"dir"`
	Labels  map[string]string `json:"labels"`
}

// Read reads an inventory and the keys that it names, whose paths are relative
// to it. The hosts are in the order of their names. The error is a
// [*shapefile.Error], with all that is wrong, or that of reading.
func Read(path string) ([]*Host, error) {
	text, err := shapefile.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var doc document
	d, err := shapefile.Decode(path, text, &doc)
	if err != nil {
		return nil, err
	}
	beside := func(name string) string {
		if filepath.IsAbs(name) {
			return name
		}
		return filepath.Join(filepath.Dir(path), name)
	}
	if d.Require("", "hosts", "an inventory lists them"); doc.Hosts != nil && len(doc.Hosts) == 0 {
		d.Fault("hosts", "lists none")
	}
	var known ssh.HostKeyCallback
	if doc.KnownHosts != "" {
		if err = regular(beside(doc.KnownHosts)); err == nil {
			known, err = knownhosts.New(beside(doc.KnownHosts))
		}
		if err != nil {
			d.Fault("knownHosts", err.Error())
		}
	}
	var hosts []*Host
	names, places := make(map[string]bool), make(map[string]bool)
	for i, entry := range doc.Hosts {
		field := func(name string) string { return fmt.Sprintf("hosts[%d].%s", i, name) }
		for _, required := range []struct{ name, text, hint string }{
			{"host", entry.Host, ""}, {"user", entry.User, ""}, {"key", entry.Key, "the path of a private key"},
		} {
			d.Require(fmt.Sprintf("hosts[%d]", i), required.name, required.hint)
			if required.text == "" && d.Has(field(required.name)) {
				d.Fault(field(required.name), "is empty")
			}
		}
		h := &Host{User: entry.User, Dir: cmp.Or(entry.Dir, DefaultDir), Labels: entry.Labels}
		port := DefaultPort
		if entry.Port != nil {
			port = *entry.Port
		}
		if port < 1 || port > 65535 {
			d.Fault(field("port"), "must be from 1 to 65535")
			port = DefaultPort
		}
		h.Endpoint = provisioning.SSHEndpoint{Host: entry.Host, Port: uint16(port)}
		h.Name = cmp.Or(entry.Name, h.Endpoint.String())
		if strings.ContainsFunc(h.Name, func(r rune) bool { return r <= ' ' || r == '@' || r == 0x7f }) {
			d.Fault(field("name"), "must hold no space, control character or @")
		}
		if (entry.Name != "" || entry.Host != "") && names[h.Name] {
			d.Fault(field("name"), fmt.Sprintf("another host is called %q", h.Name))
		}
		// Two entries of one host would be two claims on it in different
		// places, unless they mean different directories.
		place := h.Endpoint.String() + " " + h.Dir
		if entry.Host != "" && places[place] {
			d.Fault(field("host"), fmt.Sprintf("another entry is for the same directory of %v", h.Endpoint))
		}
		names[h.Name], places[place] = true, true
		if h.Key, err = readKey(beside(entry.Key)); err != nil && entry.Key != "" {
			d.Fault(field("key"), err.Error())
		}
		switch {
		case entry.HostKey != "":
			key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(entry.HostKey))
			if err != nil {
				d.Fault(field("hostKey"), "is no public key as in a .pub file")
			}
			h.HostKeys = []ssh.PublicKey{key}
		case doc.KnownHosts == "":
			d.Fault(fmt.Sprintf("hosts[%d]", i), "has no hostKey, and there is no knownHosts")
		case known != nil && entry.Host != "":
			if h.HostKeys, err = knownKeys(known, h.Endpoint); err != nil {
				d.Fault(field("host"), err.Error())
			}
		}
		hosts = append(hosts, h)
	}
	if err := d.Err(); err != nil {
		return nil, err
	}
	slices.SortFunc(hosts, func(a, b *Host) int { return cmp.Compare(a.Name, b.Name) })
	return hosts, nil
}

// regular returns why a path is no file: reading a pipe may take for ever.
func regular(path string) error {
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no regular file", path)
	}
	return err
}

// readKey reads a private key. Nothing of it gets into an error.
func readKey(path string) (ssh.Signer, error) {
	if err := regular(path); err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s is open to others than its owner", path)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	key, err := ssh.ParsePrivateKey(text)
	if _, locked := errors.AsType[*ssh.PassphraseMissingError](err); locked {
		return nil, fmt.Errorf("%s has a passphrase, which nobody is there to type", path)
	}
	if err != nil {
		return nil, fmt.Errorf("%s is no private key", path)
	}
	return key, nil
}

// nobodysKey is no key of any host: asking for it makes known_hosts tell those
// that are.
type nobodysKey struct{}

func (nobodysKey) Type() string                        { return "none" }
func (nobodysKey) Marshal() []byte                     { return nil }
func (nobodysKey) Verify([]byte, *ssh.Signature) error { return errors.New("no key") }

// knownKeys returns the keys that known_hosts has of a host and does not
// revoke. Those of certificate authorities are left out.
func knownKeys(known ssh.HostKeyCallback, at provisioning.SSHEndpoint) ([]ssh.PublicKey, error) {
	somewhere := &net.TCPAddr{IP: net.IPv4zero} // a host is found by its name alone
	wants, ok := errors.AsType[*knownhosts.KeyError](known(at.String(), somewhere, nobodysKey{}))
	var keys []ssh.PublicKey
	if ok {
		for _, want := range wants.Want {
			if known(at.String(), somewhere, want.Key) == nil {
				keys = append(keys, want.Key)
			}
		}
	}
	slices.SortFunc(keys, func(a, b ssh.PublicKey) int { return bytes.Compare(a.Marshal(), b.Marshal()) })
	if len(keys) == 0 {
		return nil, fmt.Errorf("the known hosts have no key of %v; ssh-keyscan -p %d %s shows the one to compare", at, at.Port, at.Host)
	}
	return keys, nil
}
