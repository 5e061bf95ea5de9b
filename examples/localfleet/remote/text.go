package remote

import (
	"bytes"
	"strings"
	"sync"
)

// Quote returns a word that a POSIX shell reads as s.
func Quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// longest bounds how much of an output or of a line is kept.
const longest = 64 << 10

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	if over := len(t.text) - longest; over > 0 {
		t.text = append(t.text[:0], t.text[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(strings.ToValidUTF8(string(t.text), "?"))
}

// lineWriter hands over whole lines. Of one that is too long it hands over the
// beginning, once.
type lineWriter struct {
	line    func(string)
	partial []byte
}

func (w *lineWriter) Write(p []byte) (int, error) {
	n := len(p)
	for {
		i := bytes.IndexByte(p, '\n')
		end := i
		if i < 0 {
			end = len(p)
		}
		w.partial = append(w.partial, p[:min(end, longest-len(w.partial))]...)
		if i < 0 {
			return n, nil
		}
		w.line(strings.ToValidUTF8(string(w.partial), "?"))
		w.partial, p = w.partial[:0], p[i+1:]
	}
}
