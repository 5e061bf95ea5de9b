package main

import (
	"bytes"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/swactor/provisioning"
	"github.com/swactor/provisioning/internal/scenario"
)

// writeScenario writes a scenario that repeats the journal up to its last whole
// pass. It has been run when it is written. It writes over no file.
func writeScenario(name, journalName string, journal []byte, report provisioning.ReplayReport, out io.Writer) error {
	if !strings.HasSuffix(name, ".scn") {
		return fmt.Errorf("%s: the name of a scenario ends in .scn", name)
	}
	if report.Difference != nil {
		return fmt.Errorf("from line %d on this version of the library does something else: a scenario would tell another story", report.Difference.Line)
	}
	kept := wholePasses(journal, report.Lines)
	text, err := scenario.FromJournal("What "+filepath.Base(journalName)+" holds.", kept)
	if err != nil {
		return err
	}
	if err := writeNew(name, []byte(text)); err != nil {
		return err
	}
	fmt.Fprintf(out, "wrote %s, %d lines from %d of the journal's %d, and it passes\n", name, strings.Count(text, "\n"),
		bytes.Count(kept, []byte("\n")), bytes.Count(journal, []byte("\n")))
	return nil
}
