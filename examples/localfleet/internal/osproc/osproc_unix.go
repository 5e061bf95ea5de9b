//go:build linux || darwin

package osproc

import (
	"bytes"
	"errors"
	"os"
	"syscall"
)

// TryLock takes an advisory lock without waiting and reports whether it got
// it. The lock belongs to the open file: it is shared by every process that
// inherits it and is gone when the last of them is, however that one ends.
func TryLock(f *os.File, exclusive bool) (bool, error) {
	how := syscall.LOCK_SH
	if exclusive {
		how = syscall.LOCK_EX
	}
	for {
		switch err := syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB); {
		case err == nil:
			return true, nil
		case errors.Is(err, syscall.EWOULDBLOCK):
			return false, nil
		case !errors.Is(err, syscall.EINTR):
			return false, &os.PathError{Op: "flock", Path: f.Name(), Err: err}
		}
	}
}

// Detached are the attributes of a child that signals to the terminal of its
// parent do not reach.
func Detached() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }

// Detach makes the calling process the head of a session and a process group
// of its own, both numbered like the process.
func Detach() error { return os.NewSyscallError("setsid", ignorePermission(syscall.Setsid)) }

// ignorePermission calls setsid, which refuses a process that is the head of
// a group already. That is what is wanted.
func ignorePermission(setsid func() (int, error)) error {
	_, err := setsid()
	if errors.Is(err, syscall.EPERM) && syscall.Getpgrp() == syscall.Getpid() {
		return nil
	}
	return err
}

// CloseOnExec keeps children from inheriting a descriptor.
func CloseOnExec(fd uintptr) { syscall.CloseOnExec(int(fd)) }

// Kill sends SIGKILL to a process. One that is not there counts as killed.
func Kill(pid int) error {
	if pid <= 1 { // 0 is our own group, negative ones are others
		return &os.SyscallError{Syscall: "kill", Err: syscall.EINVAL}
	}
	err := syscall.Kill(pid, syscall.SIGKILL)
	if errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return os.NewSyscallError("kill", err)
}

// KillGroup sends SIGKILL to a process group. One that is not there counts as
// killed.
func KillGroup(group int) error {
	if group <= 1 { // 0 is our own group, -1 everybody
		return &os.SyscallError{Syscall: "kill", Err: syscall.EINVAL}
	}
	err := syscall.Kill(-group, syscall.SIGKILL)
	if errors.Is(err, syscall.ESRCH) {
		return nil
	}
	return os.NewSyscallError("kill", err)
}

// hasVariable looks for a whole entry in a block of NUL-terminated strings.
func hasVariable(block []byte, name, value string) bool {
	entry := []byte("\x00" + name + "=" + value + "\x00")
	return bytes.Contains(append([]byte{0}, block...), entry)
}

func (g *Group) add(pid int, environment []byte, token string) {
	switch {
	case len(environment) == 0:
		g.Unknown++
	case hasVariable(environment, TokenVariable, token):
		g.Ours = append(g.Ours, pid)
	default:
		g.Others++
	}
}
