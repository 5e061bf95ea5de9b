// Package machine is the machine side of the fleet: a process that plays a
// rented machine. After a boot delay it answers SSH on a loopback port and runs
// real commands. It knows nothing of whoever rented it and lives on when that
// one dies.
package machine

import (
	"path/filepath"
	"time"

	"github.com/swactor/provisioning"
)

// Command is the sub-command under which a program plays a machine:
// "localfleet machine DIR".
const Command = "machine"

// LockDescriptor is the descriptor on which a machine inherits the lock of its
// directory. It holds it for as long as it lives.
const LockDescriptor = 3

// Dir is the directory of one machine. Whoever made it wrote everything but the
// record, which is the machine's own word.
type Dir string

// Lock is locked exactly as long as the machine, or somebody who is about to
// start it, lives.
func (d Dir) Lock() string { return filepath.Join(string(d), "lock") }

// Order holds an [Order].
func (d Dir) Order() string { return filepath.Join(string(d), "order.json") }

// HostKey holds the private key of the machine in PEM.
func (d Dir) HostKey() string { return filepath.Join(string(d), "host_key") }

// Record holds a [Record], once the machine has come to life.
func (d Dir) Record() string { return filepath.Join(string(d), "record.json") }

// Console takes what the machine prints.
func (d Dir) Console() string { return filepath.Join(string(d), "console.log") }

// Home is where commands run.
func (d Dir) Home() string { return filepath.Join(string(d), "home") }

// Bin comes first in the PATH of commands.
func (d Dir) Bin() string { return filepath.Join(string(d), "home", "bin") }

// Order is what was rented. It is fixed for the life of the machine.
type Order struct {
	Key   provisioning.ExternalKey     `json:"key"`
	Lease provisioning.ProviderLeaseID `json:"lease"`
	Image string                       `json:"image"`
	User  string                       `json:"user"` // the only one who may log in
	// HostKey and AuthorizedKey are public keys, in the format of
	// authorized_keys.
	HostKey       string        `json:"hostKey"`
	AuthorizedKey string        `json:"authorizedKey"`
	BootDelay     time.Duration `json:"bootDelay"` // before the port opens
	// Lifetime ends the machine by itself, so that forgotten ones do not
	// stay for ever. 0 means never.
	Lifetime time.Duration `json:"lifetime,omitempty"`
}

// Record is what a machine says of itself.
type Record struct {
	// PID is the process, and the number of its process group and session.
	PID       int       `json:"pid"`
	StartedAt time.Time `json:"startedAt"`
	// Endpoint is nil until the machine listens.
	Endpoint *provisioning.SSHEndpoint `json:"endpoint,omitempty"`
}
