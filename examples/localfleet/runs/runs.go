// Package runs remembers, in the directory of a fleet, every run that may have
// machines: a run is on record before its first create and stays there until
// nothing of it is left, whoever dies in between.
//
//	DIR/controller.lock   is locked while a controller, or a sweep, works here
//	DIR/runs/RUN.json     a [Record]
package runs

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/examples/localfleet/atomicfile"
	"github.com/swactor/provisioning/examples/localfleet/internal/osproc"
)

// ErrLocked: another controller works in this directory.
var ErrLocked = errors.New("fleet: a controller is running in this directory")

// Record is one run.
type Record struct {
	Run provisioning.RunID `json:"run"`
	// Token is [provisioning.RunToken] of the run, by which a provider that
	// keeps labels would find its machines.
	Token   string    `json:"token"`
	BeganAt time.Time `json:"beganAt"`
	// Inventory and Places are for machines that no provider lists: the file
	// that tells them, and where each is that the run has used, by its name.
	Inventory string            `json:"inventory,omitempty"`
	Places    map[string]string `json:"places,omitempty"`
}

// Dir is the directory of a fleet.
type Dir string

// Lock takes the directory for one controller. It is released by closing it,
// or by the end of the process. The error is [ErrLocked] if somebody has it.
func (d Dir) Lock() (*os.File, error) {
	if err := os.MkdirAll(d.runs(), 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(string(d), "controller.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	free, err := osproc.TryLock(lock, true)
	if err == nil && !free {
		err = fmt.Errorf("%w: %s", ErrLocked, d)
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

// Exists reports whether a controller has ever worked in this directory.
func (d Dir) Exists() (bool, error) {
	_, err := os.Stat(d.runs())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

func (d Dir) runs() string { return filepath.Join(string(d), "runs") }
func (d Dir) record(run provisioning.RunID) string {
	return filepath.Join(d.runs(), string(run)+".json")
}

// Begin puts a run on record that never was before.
func (d Dir) Begin() (Record, error) {
	run := provisioning.RunID("fleet-" + strings.ToLower(rand.Text()[:10]))
	r := Record{Run: run, Token: provisioning.RunToken(run), BeganAt: time.Now().UTC()}
	return r, d.Write(r)
}

// Write replaces the record of a run.
func (d Dir) Write(r Record) error { return atomicfile.WriteJSON(d.record(r.Run), r) }

// List returns the runs on record, the oldest first.
func (d Dir) List() ([]Record, error) {
	entries, err := os.ReadDir(d.runs())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var records []Record
	for _, entry := range entries {
		if filepath.Ext(entry.Name()) != ".json" {
			continue // a draft
		}
		var r Record
		if err := atomicfile.ReadJSON(filepath.Join(d.runs(), entry.Name()), &r); err != nil {
			return nil, fmt.Errorf("fleet: record of a run: %s: %w", entry.Name(), err)
		}
		records = append(records, r)
	}
	slices.SortStableFunc(records, func(a, b Record) int { return a.BeganAt.Compare(b.BeganAt) })
	return records, nil
}

// Forget takes a run off the record: nothing of it is left.
func (d Dir) Forget(run provisioning.RunID) error {
	if err := os.Remove(d.record(run)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
