package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io"
	"os"
	"path/filepath"
	"strings"
	"unicode"

	"github.com/swactor/provisioning"
)

const testText = `package %s

import (
	"os"
	"testing"

	"github.com/swactor/provisioning"
)

// What testdata/%s holds goes as it went.
func Test%s(t *testing.T) {
	journal, err := os.Open("testdata/%s")
	if err != nil {
		t.Fatal(err)
	}
	defer journal.Close()
	report, err := provisioning.Replay(journal)
	if err != nil {
		t.Fatal(err)
	}
	if report.Difference != nil {
		t.Error(report.Difference)
	}
}
`

// writeTest writes a test and, beside it, the part of the journal up to its
// last whole pass. It writes over no file.
func writeTest(test, journalName string, journal []byte, report provisioning.ReplayReport, out io.Writer) error {
	if !strings.HasSuffix(test, "_test.go") {
		return fmt.Errorf("%s: the name of a test ends in _test.go", test)
	}
	dir, name := filepath.Dir(test), filepath.Base(journalName)
	if strings.ContainsAny(name, "\"\\\n\r%") {
		return fmt.Errorf("%q is no name that fits into a test", name)
	}
	kept := journal
	if report.Difference == nil { // else all of it: the test is to show the difference
		kept = wholePasses(journal, report.Lines)
	}
	data := filepath.Join(dir, "testdata")
	if err := os.MkdirAll(data, 0o755); err != nil {
		return err
	}
	text := fmt.Sprintf(testText, packageOf(dir), name, title(name), name)
	if err := writeNew(test, []byte(text)); err != nil {
		return err
	}
	data = filepath.Join(data, name)
	if err := writeNew(data, kept); err != nil {
		return errors.Join(err, os.Remove(test))
	}
	fmt.Fprintf(out, "wrote %s and %s, %d of %d lines\n", test, data, bytes.Count(kept, []byte("\n")), bytes.Count(journal, []byte("\n")))
	return nil
}

// wholePasses returns of the first lines those up to the last end of a pass.
func wholePasses(journal []byte, lines int) []byte {
	end, at := 0, 0
	for i := range lines {
		next := at + bytes.IndexByte(journal[at:], '\n') + 1
		if i == 0 || bytes.HasPrefix(journal[at:], []byte(`{"end":`)) {
			end = next
		}
		at = next
	}
	return journal[:end]
}

// packageOf returns the package of a directory, or one that may be there.
func packageOf(dir string) string {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return "incident"
	}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.PackageClauseOnly)
		if err == nil {
			return parsed.Name.Name
		}
	}
	return "incident"
}

// title makes the name of a test from that of a file.
func title(name string) string {
	words := strings.FieldsFunc(strings.TrimSuffix(name, filepath.Ext(name)), func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r)
	})
	title := "Replay"
	for _, word := range words {
		runes := []rune(word)
		title += string(unicode.ToUpper(runes[0])) + string(runes[1:])
	}
	return title
}

func writeNew(name string, text []byte) error {
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = file.Write(text)
	return errors.Join(err, file.Close())
}
