//go:build linux

// Package leftover sees to it that tests leave no process and no file, and so
// no port either.
package leftover

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// patience is how long something that was told to end may take to be gone.
const patience = 10 * time.Second

// Run runs the tests of a package with a directory of their own for temporary
// files, and returns the exit status: not 0 if at the end anything is left in
// there, or any process is that runs in there or was started from there.
func Run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "lf") // short: the path of a socket is in there
	if err == nil {
		err = os.Setenv("TMPDIR", dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	status := m.Run()
	left, err := awaitNothing(dir, patience)
	for _, what := range left {
		fmt.Fprintln(os.Stderr, "left over:", what)
		status = max(status, 1)
	}
	if err == nil {
		err = os.RemoveAll(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		status = max(status, 1)
	}
	return status
}

// awaitNothing returns what is left of a directory after a while.
func awaitNothing(dir string, patience time.Duration) (left []string, err error) {
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if left, err = find(dir); err != nil || len(left) == 0 || time.Now().After(deadline) {
			return left, err
		}
	}
}

// find lists the files in a directory and the processes of it. The links of
// /proc tell where something was even after it was removed; those of a process
// that has ended, or is somebody else's, cannot be read.
func find(dir string) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		for _, link := range []string{"exe", "cwd"} {
			place, err := os.Readlink(filepath.Join("/proc", entry.Name(), link))
			if err == nil && strings.HasPrefix(place, dir+"/") {
				files = append(files, fmt.Sprintf("process %s, whose %s is %s", entry.Name(), link, place))
			}
		}
	}
	return files, nil
}
