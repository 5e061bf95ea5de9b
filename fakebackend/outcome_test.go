package fakebackend

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParseOutcome(t *testing.T) {
	all := []Outcome{OK(), OKNoEndpoint(), NotReady(), Definite(), Capacity(), RetryAfter(30 * time.Second), Error(), Ambiguous(),
		DoneAmbiguous(), DoneError(), Hang(), DoneHang(), Slow(40 * time.Second), DoneSlow(time.Minute), Late(3 * time.Minute), Panic(),
		DonePanic(), Lost(), Dead(), Vanish(5 * time.Second), SpotLoss(time.Hour), Refuse()}
	require.Len(t, all, len(words), "every outcome is tried")
	for i, want := range all {
		require.Equal(t, word(i), want.word)
		got, err := ParseOutcome(want.String())
		require.NoError(t, err)
		require.Equal(t, []Outcome{want}, got)
	}
	got, err := ParseOutcome("slow=31s*3")
	require.NoError(t, err)
	require.Equal(t, Repeat(3, Slow(31*time.Second)), got)
	for _, text := range []string{"", "okay", "OK", "slow", "slow=", "slow=40", "slow=0", "slow=-1s", "hang=1s", "ok*0", "ok*-1", "ok*x", "ok*", "ok*1000001",
		"ok*99999999999999999999", "slow*2=3s", "late=", "*2"} {
		_, err := ParseOutcome(text)
		require.ErrorIs(t, err, ErrOutcome, text)
	}
}

func TestParseClass(t *testing.T) {
	for _, want := range []Class{Token, Name, Label} {
		got, err := ParseClass(want.String())
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	_, err := ParseClass("tag")
	require.Error(t, err)
	require.Equal(t, "unknown(9)", Class(9).String())
}
