// Package atomicfile writes files that are there whole or not at all.
package atomicfile

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Write replaces a file. Readers see the old content or the new one. It is
// readable by its owner alone.
func Write(path string, content []byte) error {
	return write(path, content, os.Rename)
}

// Create makes a file, or leaves the one that is there alone and returns an
// error that is [fs.ErrExist].
func Create(path string, content []byte) error {
	return write(path, content, os.Link)
}

// WriteJSON replaces a file with the JSON of a value.
func WriteJSON(path string, value any) error {
	content, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	return Write(path, append(content, '\n'))
}

// ReadJSON reads a value that WriteJSON has written.
func ReadJSON(path string, value any) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return json.Unmarshal(content, value)
}

func write(path string, content []byte, place func(from, to string) error) (err error) {
	draft, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if removed := os.Remove(draft.Name()); !errors.Is(removed, fs.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}()
	_, err = draft.Write(content)
	if err = errors.Join(err, draft.Close()); err != nil {
		return err
	}
	return place(draft.Name(), path)
}
