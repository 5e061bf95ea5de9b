package remote

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// A shell reads back what was quoted, whatever it is.
func TestProp_QuoteComesBackFromAShell(t *testing.T) {
	shell, err := exec.LookPath("sh")
	require.NoError(t, err)
	rapid.Check(t, func(t *rapid.T) {
		words := rapid.SliceOfN(rapid.StringMatching(`[ -~\n\t\\'"$`+"`"+`é]*`), 1, 50).Draw(t, "words")
		script := "printf '%s\\0'"
		for _, word := range words {
			script += " " + Quote(word)
		}
		out, err := exec.Command(shell, "-c", script).Output()
		require.NoError(t, err)
		require.Equal(t, strings.Join(words, "\x00")+"\x00", string(out))
	})
}

// Lines come out whole, however they came in, and none is longer than allowed.
func TestProp_LinesComeWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringMatching(`[a-z\n]*`).Draw(t, "text")
		var got []string
		w := lineWriter{line: func(line string) { got = append(got, line) }}
		for rest := text; rest != ""; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "n")
			written, err := w.Write([]byte(rest[:n]))
			require.NoError(t, err)
			require.Equal(t, n, written)
			rest = rest[n:]
		}
		want := strings.Split(text, "\n")
		require.Equal(t, want[:len(want)-1], append([]string{}, got...), "what has no end yet is no line")
	})
}

func TestLongLine(t *testing.T) {
	var got []string
	w := lineWriter{line: func(line string) { got = append(got, line) }}
	for range 3 {
		_, err := w.Write([]byte(strings.Repeat("x", longest/2+1)))
		require.NoError(t, err)
	}
	_, err := w.Write([]byte("\nnext\n"))
	require.NoError(t, err)
	require.Equal(t, []string{strings.Repeat("x", longest), "next"}, got)
}

func TestTailKeepsTheEnd(t *testing.T) {
	var tl tail
	for range 3 {
		_, err := tl.Write([]byte(strings.Repeat("x", longest/2)))
		require.NoError(t, err)
	}
	_, err := tl.Write([]byte("the end\xff\n"))
	require.NoError(t, err)
	require.True(t, strings.HasSuffix(tl.String(), "xthe end?"))
	require.Less(t, len(tl.String()), longest)
}
