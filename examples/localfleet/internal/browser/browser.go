//go:build chromium

// Package browser looks at a page with a real headless Chromium, for tests.
package browser

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// patience is how long a page may take to show something.
const patience = time.Minute

// Tab is a tab of a browser of its own. Its methods fail the test.
type Tab struct {
	t   *testing.T
	ctx context.Context // of the browser
}

// Open opens a page in a new browser, which ends with the test. It fails the
// test where there is no Chromium, and when a script of the page fails.
func Open(t *testing.T, url string) *Tab {
	t.Helper()
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.UserDataDir(t.TempDir()),
		chromedp.Env("TMPDIR="+t.TempDir()), // it is killed, and does not clean up behind it
		chromedp.NoSandbox,                  // as root there is no other way
		chromedp.DisableGPU,
		chromedp.Flag("disable-quic", true),
		chromedp.Flag("disable-component-update", true),
		chromedp.WindowSize(1400, 900),
	)
	ctx, closeBrowser := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, closeTab := chromedp.NewContext(ctx)
	t.Cleanup(func() {
		closeTab()
		closeBrowser()
	})
	// The first call starts the browser, which lives as long as its context.
	require.NoError(t, chromedp.Do(ctx, chromedp.Navigate("about:blank")))
	require.NoError(t, chromedp.Listen(ctx, func(event any) {
		if e, ok := event.(*runtime.EventExceptionThrown); ok {
			t.Errorf("the page threw %+v", e.ExceptionDetails)
		}
	}))
	b := &Tab{t: t, ctx: ctx}
	b.Go(url)
	return b
}

// Go goes to another page.
func (b *Tab) Go(url string) {
	b.t.Helper()
	in(b, chromedp.Navigate(url))
}

// in runs an action in the page.
func in[T any](b *Tab, action chromedp.Action[T]) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	value, err := chromedp.Run(ctx, action)
	require.NoError(b.t, err)
	return value
}

// Text returns the value of an expression of JavaScript that is a text.
func (b *Tab) Text(expression string) string {
	b.t.Helper()
	return in(b, chromedp.Evaluate[string]("String("+expression+")"))
}

// Sees waits until an expression of JavaScript, which may throw, is true in the
// page. It asks from outside: a page may allow no script but its own.
func (b *Tab) Sees(expression string) {
	b.t.Helper()
	for deadline := time.Now().Add(patience); ; {
		if in(b, chromedp.Evaluate[bool]("(() => { try { return Boolean("+expression+") } catch { return false } })()")) {
			return
		}
		if time.Now().After(deadline) {
			require.Fail(b.t, "the page never shows "+expression, "but:\n%s", b.Text("document.body.innerText"))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// Picture keeps what the page looks like, if SCREENSHOTS names a directory.
func (b *Tab) Picture(name string) {
	b.t.Helper()
	if dir := os.Getenv("SCREENSHOTS"); dir != "" {
		require.NoError(b.t, os.WriteFile(filepath.Join(dir, name+".png"), in(b, chromedp.FullScreenshot(100)), 0o600))
	}
}
