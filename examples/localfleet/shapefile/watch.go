package shapefile

import (
	"bytes"

	"github.com/swactor/provisioning"
)

// Watcher notices that a file says something else than it did.
//
// It looks at the content, so that it does not matter how an editor replaces a
// file. New content counts once two looks in a row have found it: half a YAML
// file is often a whole one that wishes for less, and machines would be
// destroyed for a moment between two writes.
type Watcher struct {
	path string
	// settled is what was last judged, fresh what the last look found, nil if
	// it could not be read, for the reason complaint.
	settled, fresh []byte
	complaint      string
}

// Watch reads a file and watches it from then on. Errors are those of [Read].
func Watch(path string) (*Watcher, []provisioning.NodeGroupSpec, error) {
	text, err := ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	groups, err := Parse(path, text)
	return &Watcher{path: path, settled: text, fresh: text}, groups, err
}

// Look returns the groups if the file has changed, and an error if it has
// become wrong or cannot be read any more: once, until it changes again. It is
// quiet, and changed is false, while there is nothing to tell.
func (w *Watcher) Look() (groups []provisioning.NodeGroupSpec, changed bool, err error) {
	text, err := ReadFile(w.path)
	if err != nil {
		known := err.Error() == w.complaint
		w.complaint, w.fresh = err.Error(), nil
		if known {
			return nil, false, nil
		}
		return nil, false, err
	}
	back := w.complaint != "" // also a file that comes back as it was is worth a word
	stable := w.fresh != nil && bytes.Equal(text, w.fresh)
	w.fresh = text
	if !stable || bytes.Equal(text, w.settled) && !back {
		return nil, false, nil
	}
	w.complaint, w.settled = "", text
	groups, err = Parse(w.path, text)
	return groups, err == nil, err
}
