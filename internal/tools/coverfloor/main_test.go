package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const profile = `mode: set
m/a.go:1.1,2.2 19 1
m/a.go:3.1,4.2 1 0
m/b.go:1.1,2.2 1 0
m/b.go:1.1,2.2 1 1
m/b.go:1.1,2.2 1 0
m/c.go:1.1,2.2 94 7
m/c.go:3.1,4.2 6 0
m/empty.go:1.1,1.2 0 0
`

func TestFloor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cover.out")
	if err := os.WriteFile(path, []byte(profile), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		names string
		want  string // of the error; empty: it passes
	}{
		{"a.go", ""}, // exactly 95 %
		{"b.go", ""}, // one binary of three ran it
		{"a.go b.go", ""},
		{"c.go", "below 95 %: c.go"},
		{"a.go c.go b.go absent.go", "below 95 %: c.go, absent.go"},
		{"empty.go", "below 95 %: empty.go"},
		{".go", "below 95 %: .go"}, // no part of a name
		{"", "no files named"},
	} {
		var out strings.Builder
		err := run(&out, path, 95, strings.Fields(c.names))
		if got := text(err); got != c.want {
			t.Errorf("%q: got %q, want %q\n%s", c.names, got, c.want, out.String())
		}
	}
	if err := run(&strings.Builder{}, path+"x", 95, []string{"a.go"}); !os.IsNotExist(err) {
		t.Errorf("no profile: %v", err)
	}
}

func TestBrokenProfiles(t *testing.T) {
	for _, broken := range []string{"", "m/a.go:1.1,2.2 1 1\n", "mode: set\nnonsense\n", "mode: set\nm/a.go:1.1,2.2 x 1\n",
		"mode: set\nm/a.go:1.1,2.2 1 -1\n", "mode: set\na 1 1\n"} {
		if _, err := readProfile(strings.NewReader(broken)); err == nil {
			t.Errorf("%q was read", broken)
		}
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
