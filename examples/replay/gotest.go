package main

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"io"
	"os"
	"path/filepath"
	"strings"
	"unicode"

	"github.com/swactor/provisioning"
)

const testText = `package %s_test

import (
	"os"
	"testing"

	"github.com/swactor/provisioning"
)

// What testdata/%s holds goes as it went.
func %s(t *testing.T) {
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
	if base := filepath.Base(test); !strings.HasSuffix(base, "_test.go") || strings.ContainsAny(base[:1], "_.") {
		return fmt.Errorf("%s: the name of a test begins with neither _ nor . and ends in _test.go", test)
	}
	dir, name := filepath.Dir(test), filepath.Base(journalName)
	if strings.ContainsAny(name, "\"\\\n\r%") {
		return fmt.Errorf("%q is no name that fits into a test", name)
	}
	pkg, err := packageOf(dir)
	if err != nil {
		return err
	}
	function, err := freeName(dir, title(name))
	if err != nil {
		return err
	}
	kept := journal
	if report.Difference == nil { // else all of it: the test is to show the difference
		kept = wholePasses(journal, report.Lines)
	}
	data := filepath.Join(dir, "testdata")
	if err := os.MkdirAll(data, 0o755); err != nil {
		return err
	}
	text := fmt.Sprintf(testText, pkg, name, function, name)
	if err := writeNew(test, []byte(text)); err != nil {
		return err
	}
	data = filepath.Join(data, name)
	if err := writeNew(data, kept); err != nil {
		return errors.Join(err, os.Remove(test))
	}
	fmt.Fprintf(out, "wrote %s with %s and %s, %d of %d lines\n", test, function, data, bytes.Count(kept, []byte("\n")), bytes.Count(journal, []byte("\n")))
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

// packageOf returns the name of the package in a directory, found as the go
// command finds it.
func packageOf(dir string) (string, error) {
	found, err := build.ImportDir(dir, 0)
	if err != nil {
		return "", fmt.Errorf("a test needs a package beside it: %w", err)
	}
	return found.Name, nil
}

// freeName returns a name for a test that no test in the directory bears, also
// not one for another system: the name itself or one with a number behind it.
func freeName(dir, name string) (string, error) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	taken := make(map[string]bool)
	for _, file := range files {
		if !strings.HasSuffix(file.Name(), "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, file.Name()), nil, parser.SkipObjectResolution)
		if err != nil {
			return "", err
		}
		for _, declaration := range parsed.Decls {
			if f, is := declaration.(*ast.FuncDecl); is && f.Recv == nil {
				taken[f.Name.Name] = true
			}
		}
	}
	free := name
	for n := 2; taken[free]; n++ {
		free = fmt.Sprintf("%s_%d", name, n)
	}
	return free, nil
}

// title makes the name of a test from that of a file.
func title(name string) string {
	words := strings.FieldsFunc(strings.TrimSuffix(name, filepath.Ext(name)), func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r)
	})
	title := "TestReplay"
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
