// Command localfleet provisions real things over the transport that real
// fleets use: its machines are processes of this computer, reached over SSH.
package main

import (
	"fmt"
	"os"

	"github.com/swactor/provisioning/examples/localfleet/internal/child"
)

func main() {
	if status, ok := child.Main(os.Args); ok {
		os.Exit(status)
	}
	fmt.Fprintln(os.Stderr, "usage: localfleet COMMAND")
	os.Exit(2)
}
