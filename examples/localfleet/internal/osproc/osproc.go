// Package osproc is what machines need of an operating system: locks that die
// with the last process that holds them, sessions of their own, and process
// groups that can be told apart from those of strangers. It exists for Linux
// and macOS; elsewhere every function returns [ErrUnsupported].
package osproc

import (
	"errors"
	"fmt"
	"runtime"
)

// ErrUnsupported: this operating system has no process groups, or nobody has
// written down how to look into them.
var ErrUnsupported = fmt.Errorf("localfleet: machines cannot be processes on %s: %w", runtime.GOOS, errors.ErrUnsupported)

// TokenVariable is the variable of the environment that names the machine a
// process belongs to. Every process of a machine inherits it.
const TokenVariable = "LOCALFLEET_TOKEN"

// Group is what is known of the members of a process group.
type Group struct {
	// Ours holds the living members that carry the token asked for.
	Ours []int
	// Others counts the members that carry another token or none, Unknown
	// those that show no environment: another user's, or one in the middle
	// of an exec. Neither counts zombies.
	Others, Unknown int
}
