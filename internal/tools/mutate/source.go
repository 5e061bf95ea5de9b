package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
)

// mutant is one small change.
type mutant struct {
	number int
	file   string
	name   string // stays the same while the code around it changes
}

// source is the package with all mutants in it.
type source struct {
	name    string            // of the package
	changed map[string][]byte // text of the files, by name
	mutants []mutant
}

// edit puts text into a file, in the place of removed bytes.
type edit struct {
	at, removed int
	text        string
	closing     bool
	order       int
}

// mutator finds the mutants of one file. Edits nest as the nodes do: of what
// opens at one place the outer comes first, of what closes the inner.
type mutator struct {
	source *source
	fset   *token.FileSet
	info   *types.Info
	text   []byte
	file   string
	within string // the function
	edits  []edit
	seen   map[string]int
}

// load reads the package in a directory and makes the mutants of the files.
func load(dir string, files []string) (*source, error) {
	if len(files) == 0 {
		return nil, fmt.Errorf("no files named")
	}
	exports, names, err := listPackage(dir)
	if err != nil {
		return nil, err
	}
	fset := token.NewFileSet()
	var parsed []*ast.File
	texts := make(map[string][]byte)
	byName := make(map[string]*ast.File)
	for _, name := range names {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return nil, err
		}
		f, err := parser.ParseFile(fset, name, text, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		parsed = append(parsed, f)
		texts[name], byName[name] = text, f
	}
	info := &types.Info{Types: make(map[ast.Expr]types.TypeAndValue)}
	config := types.Config{Importer: importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })}
	if _, err := config.Check("p", fset, parsed, info); err != nil {
		return nil, err
	}
	s := &source{changed: make(map[string][]byte), name: parsed[0].Name.Name}
	for _, name := range files {
		f := byName[name]
		if f == nil {
			return nil, fmt.Errorf("%s is no file of the package in %s", name, dir)
		}
		m := &mutator{source: s, fset: fset, info: info, text: texts[name], file: name, seen: make(map[string]int)}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Body != nil {
				m.within = functionName(fn)
				ast.Inspect(fn.Body, m.visit)
			}
		}
		s.changed[name] = m.apply()
	}
	return s, nil
}

// listPackage asks go list for the export data of everything imported, and for
// the files of the package.
func listPackage(dir string) (exports map[string]string, files []string, err error) {
	list := func(args ...string) ([]string, error) {
		c := exec.Command("go", append([]string{"list"}, args...)...)
		c.Dir, c.Stderr = dir, os.Stderr
		out, err := c.Output()
		if err != nil {
			return nil, fmt.Errorf("go list in %s: %w", dir, err)
		}
		return strings.Split(strings.TrimSpace(string(out)), "\n"), nil
	}
	exports = make(map[string]string)
	lines, err := list("-export", "-deps", "-f", "{{.ImportPath}}\t{{.Export}}", ".")
	if err != nil {
		return nil, nil, err
	}
	for _, line := range lines {
		path, export, _ := strings.Cut(line, "\t")
		exports[path] = export
	}
	files, err = list("-f", `{{join .GoFiles "\n"}}`, ".")
	return exports, files, err
}

func functionName(fn *ast.FuncDecl) string {
	if fn.Recv == nil || len(fn.Recv.List) == 0 {
		return fn.Name.Name
	}
	t := fn.Recv.List[0].Type
	if star, ok := t.(*ast.StarExpr); ok {
		t = star.X
	}
	if id, ok := t.(*ast.Ident); ok {
		return id.Name + "." + fn.Name.Name
	}
	return fn.Name.Name
}

func (m *mutator) offset(p token.Pos) int { return m.fset.Position(p).Offset }

func (m *mutator) textOf(n ast.Node) string {
	text := strings.Join(strings.Fields(string(m.text[m.offset(n.Pos()):m.offset(n.End())])), " ")
	if len(text) > 90 {
		text = text[:90] + "..."
	}
	return text
}

// add gives a new mutant its number.
func (m *mutator) add(what string, n ast.Node) int {
	name := fmt.Sprintf("%s %s: %s: %s", m.file, m.within, what, m.textOf(n))
	m.seen[name]++
	if times := m.seen[name]; times > 1 {
		name += fmt.Sprintf(" (%d)", times)
	}
	number := len(m.source.mutants) + 1
	m.source.mutants = append(m.source.mutants, mutant{number, m.file, name})
	return number
}

func (m *mutator) wrap(n ast.Node, before, after string) {
	order := len(m.edits)
	m.edits = append(m.edits, edit{at: m.offset(n.Pos()), text: before, order: order},
		edit{at: m.offset(n.End()), text: after, closing: true, order: order})
}

func (m *mutator) replace(at token.Pos, old, text string) {
	m.edits = append(m.edits, edit{at: m.offset(at), removed: len(old), text: text, order: len(m.edits)})
}

func (m *mutator) constant(e ast.Expr) bool { return m.info.Types[e].Value != nil }

func (m *mutator) numeric(e ast.Expr) bool {
	basic, ok := m.info.TypeOf(e).Underlying().(*types.Basic)
	return ok && basic.Info()&types.IsNumeric != 0
}

// visit makes the mutants of a node.
func (m *mutator) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.BlockStmt:
		m.statements(n.List)
	case *ast.CaseClause:
		m.statements(n.Body)
		for _, e := range n.List {
			m.caseOf(e)
		}
	case *ast.CommClause:
		m.statements(n.Body)
	case *ast.IfStmt:
		m.negate(n.Cond)
	case *ast.ForStmt:
		if n.Cond != nil {
			m.negate(n.Cond)
		}
	case *ast.BinaryExpr:
		m.binary(n)
	case *ast.CallExpr:
		if id, ok := n.Fun.(*ast.Ident); ok && (id.Name == "min" || id.Name == "max") && len(n.Args) == 2 && !m.constant(n) {
			other := map[string]string{"min": "max", "max": "min"}[id.Name]
			m.replace(id.Pos(), id.Name+"(", fmt.Sprintf("mutant__%s(%d, ", id.Name, m.add(other, n)))
		}
	case *ast.Ident:
		if value := m.info.Types[n]; value.Value != nil && (n.Name == "true" || n.Name == "false") {
			op := map[string]string{"true": "!=", "false": "=="}[n.Name]
			number := m.add("the other way round", n)
			m.replace(n.Pos(), n.Name, fmt.Sprintf("(mutant__ %s %d)", op, number))
		}
	case *ast.GenDecl:
		return n.Tok == token.VAR
	}
	return true
}

// negate turns a condition round, unless its parts will be.
func (m *mutator) negate(cond ast.Expr) {
	for {
		paren, ok := cond.(*ast.ParenExpr)
		if !ok {
			break
		}
		cond = paren.X
	}
	if b, ok := cond.(*ast.BinaryExpr); ok && (logical(b.Op) || opposite(b.Op)) || m.constant(cond) {
		return // by itself
	}
	m.wrap(cond, fmt.Sprintf("(mutant__ == %d) != (", m.add("negated", cond)), ")")
}

// caseOf makes the mutants of an expression of a case: a condition negated, a
// value that is no longer met.
func (m *mutator) caseOf(e ast.Expr) {
	t := m.info.Types[e]
	if t.IsType() || t.IsNil() {
		return
	}
	switch basic, ok := t.Type.Underlying().(*types.Basic); {
	case ok && basic.Info()&types.IsBoolean != 0:
		m.negate(e)
	case ok && basic.Kind() == types.Uint8:
		m.wrap(e, fmt.Sprintf("mutant__case(%d, ", m.add("not met", e)), ")")
	}
}

func logical(op token.Token) bool { return op == token.LAND || op == token.LOR }

// opposite: a comparison that is negated where it stands.
func opposite(op token.Token) bool {
	return slices.Contains([]token.Token{token.EQL, token.NEQ, token.LSS, token.LEQ, token.GTR, token.GEQ}, op)
}

var helpers = map[token.Token]string{
	token.LSS: "mutant__less", token.LEQ: "mutant__most", token.GTR: "mutant__more", token.GEQ: "mutant__least",
	token.ADD: "mutant__plus", token.SUB: "mutant__minus", token.MUL: "mutant__times", token.QUO: "mutant__over",
}

func (m *mutator) binary(n *ast.BinaryExpr) {
	if m.constant(n) {
		return
	}
	if logical(n.Op) {
		for _, side := range []ast.Expr{n.X, n.Y} {
			format := map[token.Token]string{token.LAND: "(mutant__ == %d || (", token.LOR: "(mutant__ != %d && ("}[n.Op]
			m.wrap(side, fmt.Sprintf(format, m.add("left out", side)), "))")
			m.negate(side)
		}
		return
	}
	if opposite(n.Op) {
		m.wrap(n, fmt.Sprintf("((mutant__ == %d) != (", m.add("negated", n)), "))")
	}
	helper := helpers[n.Op]
	if helper == "" || !m.numeric(n.X) || !m.numeric(n.Y) {
		return
	}
	what := "by one"
	if !opposite(n.Op) {
		what = "the inverse"
	}
	m.wrap(n, fmt.Sprintf("%s(%d, ", helper, m.add(what, n)), ")")
	m.replace(n.OpPos, n.Op.String(), ",")
}

// statements makes mutants that leave a statement out.
func (m *mutator) statements(list []ast.Stmt) {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.ExprStmt:
			if call, ok := s.X.(*ast.CallExpr); ok && locks(call) {
				continue
			}
		case *ast.AssignStmt:
			if s.Tok == token.DEFINE || blank(s.Lhs) {
				continue
			}
		case *ast.IncDecStmt, *ast.SendStmt:
		case *ast.DeferStmt:
			if locks(s.Call) {
				continue
			}
		case *ast.BranchStmt:
			if s.Tok != token.CONTINUE && s.Tok != token.BREAK {
				continue
			}
		case *ast.ReturnStmt:
			if len(s.Results) > 0 {
				continue
			}
		default:
			continue
		}
		m.wrap(s, fmt.Sprintf("if mutant__ != %d { ", m.add("left out", s)), " }")
	}
}

// locks: what a mutex does is for the race detector.
func locks(call *ast.CallExpr) bool {
	s, ok := call.Fun.(*ast.SelectorExpr)
	return ok && slices.Contains([]string{"Lock", "Unlock", "RLock", "RUnlock"}, s.Sel.Name)
}

func blank(lhs []ast.Expr) bool {
	id, ok := lhs[0].(*ast.Ident)
	return ok && len(lhs) == 1 && id.Name == "_"
}

// apply returns the text with all edits.
func (m *mutator) apply() []byte {
	sort.SliceStable(m.edits, func(i, j int) bool {
		a, b := m.edits[i], m.edits[j]
		switch {
		case a.at != b.at:
			return a.at < b.at
		case a.closing != b.closing:
			return a.closing
		case a.closing:
			return a.order > b.order
		}
		return a.order < b.order
	})
	var out bytes.Buffer
	at := 0
	for _, e := range m.edits {
		out.Write(m.text[at:e.at])
		out.WriteString(e.text)
		at = e.at + e.removed
	}
	out.Write(m.text[at:])
	return out.Bytes()
}

// switchboard is a file of the package that says which mutant it is.
const switchboard = `

import (
	"cmp"
	"os"
	"strconv"
)

var mutant__, _ = strconv.Atoi(os.Getenv("MUTANT"))

type mutant__number interface {
	~int | ~int8 | ~int16 | ~int32 | ~int64 | ~uint | ~uint8 | ~uint16 | ~uint32 | ~uint64 | ~float32 | ~float64
}

func mutant__if[T any](n int, is, otherwise T) T {
	if mutant__ == n {
		return otherwise
	}
	return is
}

func mutant__less[T cmp.Ordered](n int, a, b T) bool  { return mutant__if(n, a < b, a <= b) }
func mutant__most[T cmp.Ordered](n int, a, b T) bool  { return mutant__if(n, a <= b, a < b) }
func mutant__more[T cmp.Ordered](n int, a, b T) bool  { return mutant__if(n, a > b, a >= b) }
func mutant__least[T cmp.Ordered](n int, a, b T) bool { return mutant__if(n, a >= b, a > b) }

func mutant__plus[T mutant__number](n int, a, b T) T  { return mutant__if(n, a+b, a-b) }
func mutant__minus[T mutant__number](n int, a, b T) T { return mutant__if(n, a-b, a+b) }

func mutant__times[T mutant__number](n int, a, b T) T {
	if mutant__ == n {
		return a / b
	}
	return a * b
}

func mutant__over[T mutant__number](n int, a, b T) T {
	if mutant__ == n {
		return a * b
	}
	return a / b
}

func mutant__case[T ~uint8](n int, v T) T { return mutant__if(n, v, ^v) }

func mutant__min[T cmp.Ordered](n int, a, b T) T { return mutant__if(n, min(a, b), max(a, b)) }
func mutant__max[T cmp.Ordered](n int, a, b T) T { return mutant__if(n, max(a, b), min(a, b)) }
`
