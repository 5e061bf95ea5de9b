package scenario

import (
	"fmt"
	"strings"

	"github.com/swactor/provisioning/internal/invariant"
)

// Failure says where a scenario failed and what had happened until then.
type Failure struct {
	File string
	Line int    // from 1
	Text string // of the line
	// Expected and Found say what was to be there and what was.
	Expected, Found string
	// Trace is what had happened, oldest first; LeftOut how many earlier
	// entries were not kept.
	Trace   []string
	LeftOut int
}

// Error tells all of it.
func (f *Failure) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s:%d: %s\n  expected: %s\n  found:    %s\n", f.File, f.Line, f.Text, f.Expected, f.Found)
	if f.Trace != nil {
		b.WriteString("trace so far:\n")
	}
	if f.LeftOut > 0 {
		fmt.Fprintf(&b, "  (%d earlier entries are left out)\n", f.LeftOut)
	}
	for _, entry := range f.Trace {
		b.WriteString("  " + entry + "\n")
	}
	return b.String()
}

// wrong is the error of a command; Run adds where it was.
func wrong(expected, found string) error { return invariant.Wrong(expected, found) }

// keptTrace bounds the trace: a scenario may run for virtual weeks.
const keptTrace = 300

type trace struct {
	entries []string
	leftOut int
}

func (t *trace) add(format string, args ...any) {
	if len(t.entries) == 2*keptTrace {
		t.leftOut += keptTrace
		t.entries = append(t.entries[:0], t.entries[keptTrace:]...)
	}
	t.entries = append(t.entries, fmt.Sprintf(format, args...))
}
