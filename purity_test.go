package provisioning

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

// The pure rooms: functions of their arguments and nothing else. That is why a
// pass can be repeated, replayed and explained (G1).
var pureRooms = []string{
	"identity.go", "shape.go", "backoff.go", "observation.go",
	"state.go", "observe.go", "decide.go", "plan.go", "check.go",
	"transition.go", "capacity.go", "internal/pqueue/pqueue.go",
}

func TestPureRooms(t *testing.T) {
	for _, room := range pureRooms {
		t.Run(room, func(t *testing.T) {
			source, err := os.ReadFile(room)
			require.NoError(t, err)
			found, err := impurities(room, source)
			require.NoError(t, err)
			require.Empty(t, found)
		})
	}
}

// impureImports are refused with all that lies below them.
var impureImports = []string{"context", "sync", "os", "io", "net", "log", "math/rand", "crypto/rand", "runtime", "unsafe", "syscall", "testing"}

// impureNames are what is refused of packages that may be imported.
var impureNames = map[string][]string{
	"time": {"Now", "Since", "Until", "After", "Sleep", "NewTimer", "NewTicker", "Tick", "AfterFunc", "Local", "LoadLocation"},
	"fmt":  {"Print", "Printf", "Println", "Scan", "Scanf", "Scanln"},
}

// impurities lists what a source file does that a pure room may not: reach for
// clock, randomness, context, I/O or log, or start anything.
func impurities(name string, source []byte) ([]string, error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, source, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var found []string
	report := func(node ast.Node, what string) {
		found = append(found, fmt.Sprintf("%v: %s", files.Position(node.Pos()), what))
	}
	imported := make(map[string]string) // local name to path
	for _, spec := range file.Imports {
		target, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return nil, err
		}
		for _, refused := range impureImports {
			if target == refused || strings.HasPrefix(target, refused+"/") {
				report(spec, "imports "+target)
			}
		}
		local := path.Base(target)
		if spec.Name != nil {
			local = spec.Name.Name
		}
		if local == "." {
			report(spec, "imports "+target+" without a name") // its names cannot be told from our own
		}
		imported[local] = target
	}
	ast.Inspect(file, func(node ast.Node) bool {
		switch n := node.(type) {
		case *ast.SelectorExpr: // also without a call: a clock may not be handed on
			if local, ok := n.X.(*ast.Ident); ok && slices.Contains(impureNames[imported[local.Name]], n.Sel.Name) {
				report(n, "uses "+imported[local.Name]+"."+n.Sel.Name)
			}
		case *ast.CallExpr:
			if builtin, ok := n.Fun.(*ast.Ident); ok && (builtin.Name == "print" || builtin.Name == "println") {
				report(n, "calls "+builtin.Name)
			}
		case *ast.GoStmt:
			report(n, "starts a goroutine")
		case *ast.SelectStmt:
			report(n, "selects")
		case *ast.ChanType:
			report(n, "has a channel")
		case *ast.SendStmt:
			report(n, "sends")
		case *ast.UnaryExpr:
			if n.Op == token.ARROW {
				report(n, "receives")
			}
		}
		return true
	})
	return found, nil
}

func TestImpuritiesAreFound(t *testing.T) {
	for _, c := range []struct {
		why, source string
		want        []string
	}{
		{"pure", `import ("time"; "fmt"; "maps"); func f(now time.Time) string { return fmt.Sprint(now.Add(time.Second).After(now)) }`, nil},
		{"a method of that name is no clock", `func f(a, b interface{ After(any) bool }) bool { return a.After(b) }`, nil},
		{"words are not deeds", "// go func() { time.Now() }\nconst x = `select {} <-c`", nil},
		{"near names", `import ("iter"; "logic"; "network/x"; "syncs")`, nil},

		{"context", `import "context"`, []string{"imports context"}},
		{"under another name", `import c "context"`, []string{"imports context"}},
		{"blank", `import _ "os"`, []string{"imports os"}},
		{"every one", `import ("sync"; "os"; "io"; "net"; "log"; "log/slog"; "math/rand"; "crypto/rand"; "runtime"; "unsafe")`, []string{
			"imports sync", "imports os", "imports io", "imports net", "imports log", "imports log/slog",
			"imports math/rand", "imports crypto/rand", "imports runtime", "imports unsafe"}},
		{"what lies below", `import ("sync/atomic"; "math/rand/v2"; "io/fs"; "os/exec"; "net/http"; "runtime/debug")`, []string{
			"imports sync/atomic", "imports math/rand/v2", "imports io/fs", "imports os/exec", "imports net/http", "imports runtime/debug"}},
		{"no name", `import . "time"; var x = Now()`, []string{"imports time without a name"}},

		{"clock", `import "time"; var x = time.Now()`, []string{"uses time.Now"}},
		{"clock under another name", `import t "time"; var x = t.Now()`, []string{"uses time.Now"}},
		{"clock handed on", `import "time"; var clock = time.Now`, []string{"uses time.Now"}},
		{"every clock", `import "time"; func f(d time.Duration, t time.Time) {
			time.Since(t); time.Until(t); time.After(d); time.Sleep(d); time.NewTimer(d); time.NewTicker(d); time.Tick(d); time.AfterFunc(d, nil) }`, []string{
			"uses time.Since", "uses time.Until", "uses time.After", "uses time.Sleep", "uses time.NewTimer", "uses time.NewTicker", "uses time.Tick", "uses time.AfterFunc"}},
		{"output", `import "fmt"; func f() { fmt.Println(1); println(2) }`, []string{"uses fmt.Println", "calls println"}},

		{"goroutine", `func f() { go f() }`, []string{"starts a goroutine"}},
		{"deep inside", `var f = func() { for { if true { defer func() { go func() {}() }() } } }`, []string{"starts a goroutine"}},
		{"channel type", `type t struct{ c chan int }`, []string{"has a channel"}},
		{"one-way channel", `func f(c <-chan int) {}`, []string{"has a channel"}},
		{"made", `func f() { _ = make(chan int) }`, []string{"has a channel"}},
		{"sent to", `func f(c T) { c <- 1 }`, []string{"sends"}},
		{"received from", `func f(c T) { <-c }`, []string{"receives"}},
		{"select", `func f() { select {} }`, []string{"selects"}},
	} {
		found, err := impurities("x.go", []byte("package x\n"+c.source))
		require.NoError(t, err, c.why)
		var got []string
		for _, line := range found {
			place, what, _ := strings.Cut(line, ": ")
			require.Regexp(t, `^x\.go:\d+:\d+$`, place)
			got = append(got, what)
		}
		require.Equal(t, c.want, got, c.why)
	}
	_, err := impurities("x.go", []byte("package x; func {"))
	require.Error(t, err, "what cannot be read is not pure")
}

const modulePath = "github.com/swactor/provisioning"

// Who imports the library gets the standard library with it and nothing else.
func TestOnlyTheStandardLibrary(t *testing.T) {
	for _, dir := range []string{".", "fakebackend"} {
		found, err := foreignImports(os.DirFS("."), dir)
		require.NoError(t, err)
		require.Empty(t, found)
	}
}

// foreignImports lists what the package in dir imports outside its tests that
// is neither standard nor ours, and the same of ours that it imports. Files
// for every platform count.
func foreignImports(root fs.FS, dir string) ([]string, error) {
	var found []string
	seen := map[string]bool{dir: true}
	for queue := []string{dir}; len(queue) > 0; queue = queue[1:] {
		sources, err := fs.Glob(root, path.Join(queue[0], "*.go"))
		if err != nil {
			return nil, err
		}
		sources = slices.DeleteFunc(sources, func(name string) bool { return strings.HasSuffix(name, "_test.go") })
		if len(sources) == 0 {
			return nil, fmt.Errorf("%s holds no package", queue[0])
		}
		for _, name := range sources {
			text, err := fs.ReadFile(root, name)
			if err != nil {
				return nil, err
			}
			file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ImportsOnly)
			if err != nil {
				return nil, err
			}
			for _, spec := range file.Imports {
				target, err := strconv.Unquote(spec.Path.Value)
				if err != nil {
					return nil, err
				}
				first, _, _ := strings.Cut(target, "/")
				switch ours, inside := strings.CutPrefix(target+"/", modulePath+"/"); {
				case inside:
					if next := path.Clean(ours); !seen[next] {
						seen[next] = true
						queue = append(queue, next)
					}
				case strings.Contains(first, ".") || target == "C": // a standard path has no dot in front
					found = append(found, name+" imports "+target)
				}
			}
		}
	}
	return found, nil
}

func TestForeignImportsAreFound(t *testing.T) {
	file := func(source string) *fstest.MapFile { return &fstest.MapFile{Data: []byte("package x\n" + source)} }
	root := fstest.MapFS{
		"good.go":      file(`import ("fmt"; "go/ast"; "` + modulePath + `/internal/heap")`),
		"good_test.go": file(`import "github.com/stretchr/testify/require"`),
		"bad/bad.go":   file(`import ("C"; "golang.org/x/exp/maps"; "` + modulePath + `"; _ "` + modulePath + `-contrib")`),
		// Of another platform, and reached over another package.
		"internal/heap/heap.go":         file(`import "` + modulePath + `/internal/deep"`),
		"internal/deep/deep.go":         file(``),
		"reach/reach.go":                file(`import "` + modulePath + `/internal/reached"`),
		"internal/reached/x_windows.go": file(`import "github.com/x/y"`),
		"lost/lost.go":                  file(`import "` + modulePath + `/nowhere"`),
		"broken/broken.go":              file(`import`),
		"tests/only_test.go":            file(``),
	}
	for dir, want := range map[string][]string{
		".":     nil,
		"bad":   {"bad/bad.go imports C", "bad/bad.go imports golang.org/x/exp/maps", "bad/bad.go imports " + modulePath + "-contrib"},
		"reach": {"internal/reached/x_windows.go imports github.com/x/y"},
	} {
		found, err := foreignImports(root, dir)
		require.NoError(t, err)
		require.Equal(t, want, found, dir)
	}
	for _, dir := range []string{"lost", "broken", "tests", "absent"} {
		_, err := foreignImports(root, dir)
		require.Error(t, err, dir)
	}
}
