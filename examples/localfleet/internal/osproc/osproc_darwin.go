package osproc

import (
	"bytes"
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

const zombie = 5 // SZOMB of sys/proc.h

// Members asks the kernel for the members of a process group and for their
// arguments, behind which it keeps their environment. Of the system's own
// programs (/bin/sh) it may not show that: they count as unknown.
func Members(group int, token string) (Group, error) {
	var g Group
	members, err := unix.SysctlKinfoProcSlice("kern.proc.pgrp", group)
	if err != nil {
		return g, err
	}
	for _, m := range members {
		if m.Proc.P_stat == zombie {
			continue
		}
		pid := int(m.Proc.P_pid)
		arguments, err := unix.SysctlRaw("kern.procargs2", pid)
		if errors.Is(err, unix.ESRCH) {
			continue
		}
		g.add(pid, environmentOf(arguments), token)
	}
	return g, nil
}

// environmentOf skips the count of arguments, the path of the program, the
// padding behind it and the arguments.
func environmentOf(block []byte) []byte {
	if len(block) < 4 {
		return nil
	}
	arguments := int(binary.NativeEndian.Uint32(block))
	_, rest, _ := bytes.Cut(block[4:], []byte{0})
	rest = bytes.TrimLeft(rest, "\x00")
	for range arguments {
		_, rest, _ = bytes.Cut(rest, []byte{0})
	}
	if rest = bytes.TrimRight(rest, "\x00"); len(rest) == 0 {
		return nil
	}
	return append(bytes.Clone(rest), 0)
}
