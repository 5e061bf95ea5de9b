package osproc

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"syscall"
)

// Members looks at a process group in /proc.
func Members(group int, token string) (Group, error) {
	return scan(token, func(s stat) bool { return s.group == group })
}

// Carriers looks at every process there is and returns those that carry a
// token. For tests, which trust no record.
func Carriers(token string) ([]int, error) {
	g, err := scan(token, func(stat) bool { return true })
	return g.Ours, err
}

func scan(token string, wanted func(stat) bool) (Group, error) {
	var g Group
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return g, err
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue // not a process
		}
		s, err := readStat(pid)
		if vanished(err) {
			continue
		}
		if err != nil {
			return g, err
		}
		if s.dead() || !wanted(s) {
			continue
		}
		environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		switch {
		case vanished(err):
			continue
		case err != nil && !errors.Is(err, fs.ErrPermission):
			return g, err
		}
		if len(environment) == 0 {
			// A process that ends loses its environment before it becomes
			// a zombie.
			if s, err := readStat(pid); vanished(err) || err == nil && (s.dead() || !wanted(s)) {
				continue
			}
		}
		g.add(pid, environment, token)
	}
	return g, nil
}

func vanished(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
}

type stat struct {
	state byte
	group int
}

// dead: a zombie, or about to be one, runs nothing and holds nothing.
func (s stat) dead() bool { return s.state == 'Z' || s.state == 'X' }

// readStat reads /proc/PID/stat: "PID (NAME) STATE PPID PGRP ...", where NAME
// may hold anything.
func readStat(pid int) (stat, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, err
	}
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(fields) < 3 || len(fields[0]) != 1 {
		return stat{}, fmt.Errorf("localfleet: cannot read the stat of process %d: %q", pid, text)
	}
	group, err := strconv.Atoi(string(fields[2]))
	return stat{state: fields[0][0], group: group}, err
}
