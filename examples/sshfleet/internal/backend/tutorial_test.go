package backend

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/swactor/provisioning"
)

// The backend is read to learn how one is written: its methods stand in one
// file, none is longer than a screen, and every rule of the contract is named
// where it is obeyed.
func TestBackendReadsAsATutorial(t *testing.T) {
	const tooLong = 60
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, "backend.go", nil, parser.ParseComments)
	require.NoError(t, err)
	lines := make(map[string]int)
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Recv != nil {
			lines[f.Name.Name] = fset.Position(f.End()).Line - fset.Position(f.Pos()).Line + 1
		}
	}
	contract := reflect.TypeFor[provisioning.EffectBackend]()
	require.Equal(t, 6, contract.NumMethod())
	for method := range contract.Methods() {
		require.Contains(t, lines, method.Name)
		require.Less(t, lines[method.Name], tooLong, method.Name)
	}
	comments := ""
	for _, c := range file.Comments {
		comments += c.Text()
	}
	for rule := 1; rule <= 11; rule++ {
		require.Regexp(t, fmt.Sprintf(`\bB%d\b`, rule), comments)
	}
}
