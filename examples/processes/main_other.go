//go:build !unix

// Command processes rents child processes in process groups, which only
// Unix-like systems have.
package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Fprintln(os.Stderr, "processes: this example needs a Unix-like system")
	os.Exit(1)
}
