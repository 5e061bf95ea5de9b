package shapefile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// parseJSON returns a JSON text as a tree of YAML, so that both are judged by
// the same rules. A YAML parser is no help: it does not know all escapes of
// JSON.
func parseJSON(text []byte) (*yaml.Node, error) {
	if !utf8.Valid(text) {
		return nil, errors.New("the file is not UTF-8")
	}
	r := jsonReader{text: text, tokens: json.NewDecoder(bytes.NewReader(text))}
	r.tokens.UseNumber()
	root, err := r.value()
	if errors.Is(err, io.EOF) && len(bytes.TrimSpace(text)) == 0 {
		return nil, errEmpty
	}
	if err == nil {
		if _, more := r.tokens.Token(); !errors.Is(more, io.EOF) {
			return nil, &syntaxError{r.line(), "something follows the shape"}
		}
		return root, nil
	}
	line := r.line()
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		line = r.lineAt(syntax.Offset)
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return nil, &syntaxError{line, err.Error()}
}

type jsonReader struct {
	text   []byte
	tokens *json.Decoder
}

// line is that of the token read last.
func (r *jsonReader) line() int { return r.lineAt(r.tokens.InputOffset()) }

func (r *jsonReader) lineAt(offset int64) int {
	return 1 + bytes.Count(r.text[:min(int(offset), len(r.text))], []byte("\n"))
}

func (r *jsonReader) value() (*yaml.Node, error) {
	token, err := r.tokens.Token()
	if err != nil {
		return nil, err
	}
	n := &yaml.Node{Kind: yaml.ScalarNode, Line: r.line()}
	switch token := token.(type) {
	case nil:
		n.Tag = "!!null"
	case bool:
		n.Tag, n.Value = "!!bool", strconv.FormatBool(token)
	case string:
		n.Tag, n.Value = "!!str", token
	case json.Number:
		n.Tag, n.Value = "!!float", token.String()
		if _, err := strconv.ParseInt(n.Value, 10, 64); err == nil {
			n.Tag = "!!int"
		}
	case json.Delim:
		n.Kind, n.Tag = yaml.SequenceNode, "!!seq"
		if token == '{' {
			n.Kind, n.Tag = yaml.MappingNode, "!!map"
		}
		for r.tokens.More() {
			child, err := r.value()
			if err != nil {
				return nil, err
			}
			n.Content = append(n.Content, child)
		}
		if _, err := r.tokens.Token(); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("unexpected %v", token)
	}
	return n, nil
}
