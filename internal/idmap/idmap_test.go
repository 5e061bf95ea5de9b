package idmap

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// A Map says what a built-in map says, and has no page too many.
func TestMapIsAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var m Map[int]
		model := make(map[uint64]int)
		id := rapid.OneOf(rapid.Uint64Range(0, 200), rapid.Uint64Range(0, 1<<20), rapid.Uint64())
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				id, value := id.Draw(t, "id"), rapid.Int().Draw(t, "value")
				m.Put(id, value)
				model[id] = value
			},
			"put zero": func(t *rapid.T) {
				id := id.Draw(t, "id")
				m.Put(id, 0)
				model[id] = 0
			},
			"delete": func(t *rapid.T) {
				id := id.Draw(t, "id")
				m.Delete(id)
				delete(model, id)
			},
			"get": func(t *rapid.T) {
				id := id.Draw(t, "id")
				require.Equal(t, model[id], m.Get(id), "%d", id)
			},
			"": func(t *rapid.T) {
				require.Equal(t, len(model), m.Len())
				pages := make(map[uint64]bool)
				for id, value := range model {
					require.Equal(t, value, m.Get(id), "%d", id)
					pages[id/pageSize] = true
				}
				require.Equal(t, len(pages), m.Pages())
			},
		})
	})
}

// Numbers that come and go for ever leave nothing behind.
func TestMapFollowsWhatIsThere(t *testing.T) {
	var m Map[*int]
	value := new(int)
	for id := range uint64(100_000) {
		m.Put(id, value)
		if id >= 100 {
			m.Delete(id - 100)
		}
		require.LessOrEqual(t, m.Pages(), 100/pageSize+2)
	}
	require.Equal(t, 100, m.Len())
	require.Nil(t, m.Get(0))
}
