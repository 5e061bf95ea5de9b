package provisioning

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// README.md shows the ladder and the code of examples. Both are compared with
// what the code says; go test -run TestREADME -update writes them anew.
func TestREADME(t *testing.T) {
	was, err := os.ReadFile("README.md")
	require.NoError(t, err)
	is := readmeExamples(t, readmeLadder(t, string(was)))
	if *updateGolden {
		require.NoError(t, os.WriteFile("README.md", []byte(is), 0o644))
		return
	}
	require.Equal(t, is, string(was), "README.md is behind the code; write it anew with -update")
}

// Each rule that waits has its line where README.md says what the waits mean.
func TestREADMETellsEveryWait(t *testing.T) {
	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(text), "\n## Operating it\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	for i := range ladder {
		if ladder[i].until != nil {
			require.Contains(t, section, "\n| `"+ladder[i].Name+"` |")
		}
	}
}

func readmeLadder(t *testing.T, text string) string {
	begin, end := "<!-- ladder -->\n", "<!-- /ladder -->"
	require.Equal(t, 1, strings.Count(text, begin), "README.md has one place for the ladder")
	before, rest, _ := strings.Cut(text, begin)
	_, after, found := strings.Cut(rest, end)
	require.True(t, found)
	table := "| R | rule | action | why |\n|---|---|---|---|\n"
	for i := range ladder {
		table += fmt.Sprintf("| %d | `%s` | %s | %s |\n", ladder[i].Number, ladder[i].Name, readmeAction(&ladder[i]), ladder[i].Why)
	}
	return before + begin + table + end + after
}

func readmeAction(r *rule) string {
	switch {
	case r.action == Dispatch && r.operation == NoOperation:
		return "Dispatch the remembered one"
	case r.action == Dispatch:
		return r.action.String() + " " + r.operation.String()
	case r.action == Fail:
		return "fault"
	case r.until != nil:
		return "wait"
	}
	return r.action.String()
}

// readmeExamples puts the body of an Example function behind each
// "<!-- example: Name -->" line.
func readmeExamples(t *testing.T, text string) string {
	bodies := exampleBodies(t)
	place := regexp.MustCompile("(?m)^<!-- example: (\\w+) -->\n(```go\n(?s:.*?)\n```\n)?")
	return place.ReplaceAllStringFunc(text, func(found string) string {
		name := place.FindStringSubmatch(found)[1]
		body, ok := bodies[name]
		require.True(t, ok, "README.md shows %s, which is no Example of this package", name)
		return "<!-- example: " + name + " -->\n```go\n" + body + "\n```\n"
	})
}

func exampleBodies(t *testing.T) map[string]string {
	files, err := filepath.Glob("example*_test.go")
	require.NoError(t, err)
	bodies := make(map[string]string)
	for _, file := range files {
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		set := token.NewFileSet()
		parsed, err := parser.ParseFile(set, file, source, parser.ParseComments)
		require.NoError(t, err)
		for _, d := range parsed.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || !strings.HasPrefix(f.Name.Name, "Example") {
				continue
			}
			body := string(source[set.Position(f.Body.Lbrace).Offset+1 : set.Position(f.Body.Rbrace).Offset])
			body, _, _ = strings.Cut(body, "\n\t// Output:")
			lines := strings.Split(strings.Trim(body, "\n"), "\n")
			for i := range lines {
				lines[i] = strings.TrimPrefix(lines[i], "\t")
			}
			bodies[f.Name.Name] = strings.TrimRight(strings.Join(lines, "\n"), "\n")
		}
	}
	return bodies
}
