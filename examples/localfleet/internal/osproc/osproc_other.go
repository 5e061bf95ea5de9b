//go:build !linux && !darwin

package osproc

import (
	"os"
	"syscall"
)

func TryLock(*os.File, bool) (bool, error) { return false, ErrUnsupported }
func Detached() *syscall.SysProcAttr       { return nil }
func Detach() error                        { return ErrUnsupported }
func CloseOnExec(uintptr)                  {}
func Kill(int) error                       { return ErrUnsupported }
func KillGroup(int) error                  { return ErrUnsupported }
func Members(int, string) (Group, error)   { return Group{}, ErrUnsupported }
