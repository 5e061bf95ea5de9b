package process

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/internal/machine"
	"github.com/swactor/provisioning/examples/localfleet/internal/osproc"
)

// isLocked reports whether somebody holds the lock of a machine. The error is
// [fs.ErrNotExist] if there is none. The look itself may keep takeLock from the
// lock for a moment, which tries again.
func isLocked(dir machine.Dir) (bool, error) {
	lock, err := os.Open(dir.Lock())
	if err != nil {
		return false, err
	}
	free, err := osproc.TryLock(lock, false)
	return !free, errors.Join(err, lock.Close())
}

// takeLock takes the lock of a machine if it is free. Whoever has it and sees
// the directory still in its place is alone with it.
func takeLock(dir machine.Dir) (lock *os.File, free bool, err error) {
	lock, err = os.OpenFile(dir.Lock(), os.O_RDWR, 0)
	if err != nil {
		return nil, false, err
	}
	free, err = osproc.TryLock(lock, true)
	if err == nil && free {
		free, err = inPlace(lock, dir.Lock())
	}
	if err != nil || !free {
		return nil, false, errors.Join(err, lock.Close())
	}
	return lock, true, nil
}

// inPlace reports whether an open file is still the one at a path.
func inPlace(f *os.File, path string) (bool, error) {
	open, err := f.Stat()
	if err != nil {
		return false, err
	}
	there, err := os.Stat(path)
	if err != nil {
		return false, err
	}
	return os.SameFile(open, there), nil
}

// readBanner connects and waits for the line that an SSH server begins with.
func readBanner(ctx context.Context, address string) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	const longest = 255 // RFC 4253, 4.2
	line, err := bufio.NewReaderSize(conn, longest).ReadSlice('\n')
	if err != nil {
		return err
	}
	if !strings.HasPrefix(string(line), "SSH-2.0-") {
		return fmt.Errorf("localfleet: %s does not speak SSH", address)
	}
	return nil
}

// lastLine returns the last line of a file, for a person to read.
func lastLine(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return lines[len(lines)-1]
}

func compareKeys(a, b provisioning.ExternalKey) int {
	return cmp.Or(cmp.Compare(a.Run, b.Run), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Attempt, b.Attempt))
}
